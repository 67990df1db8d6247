"""The text of an error: what came, what is allowed, what to do."""

import pickle

import pytest

from vattn import errors
from vattn.errors import ShapeError, UnsupportedRequestError, VattnError


def test_three_sentences():
    assert str(ShapeError("got.", "allowed", "fix")) == "got. Allowed: allowed. Try: fix."
    assert str(ShapeError("got", "", "fix")) == "got. Try: fix."
    assert str(ShapeError("got")) == "got."


def test_a_table_stands_on_lines_of_its_own():
    assert str(UnsupportedRequestError("no backend\n  A : why\n", "this")) == "no backend\n  A : why\nAllowed: this."


@pytest.mark.parametrize("name", [name for name, kind in vars(errors).items() if isinstance(kind, type)])
def test_every_error_survives_pickling(name):
    error = getattr(errors, name)("got", "allowed", "fix")
    twin = pickle.loads(pickle.dumps(error))
    assert isinstance(twin, VattnError) and type(twin) is type(error)
    assert (twin.got, twin.allowed, twin.fix) == ("got", "allowed", "fix")
    assert str(twin) == str(error)
