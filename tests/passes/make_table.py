"""Writes the table of forms into verdicts.md: `python tests/passes/make_table.py`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

import test_forms


def main() -> None:
    torch.set_num_threads(1)
    table, everything_wrong = [], []
    for names in test_forms.BUNDLES:
        forms = [test_forms.FORMS[name] for name in names]
        report, wrong = test_forms.check(forms)
        table += test_forms.lines(forms, report)
        everything_wrong += wrong
    page = Path(__file__).with_name("verdicts.md")
    kept = page.read_text().split(test_forms.TITLE)[0]
    page.write_text("\n".join((kept + test_forms.TITLE, "|---|---|---|", *table, "")))
    print("\n".join(everything_wrong), f"{len(table)} forms", sep="\n")


if __name__ == "__main__":
    main()
