import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vattn.cache.block_pool import BlockPool, BlockTable
from vattn.errors import BlockError, ConfigError, OutOfBlocksError


def test_double_free_is_refused_by_name_and_frees_nothing():
    pool = BlockPool(6)
    first, second = pool.allocate(2)
    pool.free([first])
    with pytest.raises(BlockError, match=rf"\b{first} \(0 owners\)"):
        pool.free([second, first])
    assert pool.references(second) == 1
    with pytest.raises(BlockError, match=rf"\b{second} \(1 owners\)"):
        pool.free([second, second])
    pool.check()


@pytest.mark.parametrize("block_id", [0, -1, 6, 10**9, "2", 2.0])
@pytest.mark.parametrize("action", ["free", "fork", "writable", "references"])
def test_unknown_ids_are_refused_by_name(block_id, action):
    pool = BlockPool(6)
    taken = pool.allocate(2)
    with pytest.raises(BlockError, match=repr(block_id)):
        getattr(pool, action)([taken[0], block_id] if action in ("free", "fork") else block_id)
    assert [pool.references(b) for b in taken] == [1, 1]


def test_a_free_block_cannot_be_forked_or_written():
    pool = BlockPool(4)
    with pytest.raises(BlockError, match="not allocated: 2"):
        pool.fork([2])
    with pytest.raises(BlockError, match="not allocated: 2"):
        pool.writable(2)


@pytest.mark.parametrize("arguments", [(1, 1), (0, 0), (4, -1), (2, 5)])
def test_a_pool_without_blocks_is_refused(arguments):
    num_blocks, reserved = arguments
    with pytest.raises(ConfigError, match=f"{num_blocks} blocks with {reserved} reserved"):
        BlockPool(num_blocks, reserved=reserved)


def test_negative_amounts_are_refused():
    pool = BlockPool(4)
    with pytest.raises(BlockError, match="num_blocks=-1"):
        pool.allocate(-1)
    with pytest.raises(BlockError, match="-1 tokens"):
        BlockTable(pool, 16).append(-1)
    with pytest.raises(ConfigError, match="block_size=0"):
        BlockTable(pool, 0)


def test_blocks_are_handed_out_low_ids_first_and_freed_ones_again():
    pool = BlockPool(6, reserved=0)
    assert pool.allocate(3) == [0, 1, 2]
    pool.free([1])
    pool.free([0])
    assert pool.allocate(3) == [0, 1, 3], "the block freed last is the next one"


@pytest.mark.parametrize("damage", ["leak", "twice", "owned and free", "negative"])
def test_check_finds_damage(damage):
    pool = BlockPool(6)
    pool.allocate(2)
    if damage == "leak":
        pool._free.pop()
    elif damage == "twice":
        pool._free[0] = pool._free[1]
    elif damage == "negative":
        pool._references[pool._free[0]] = -1
    else:
        pool._references[pool._free[0]] = 1
    with pytest.raises(BlockError, match="pool of 6 blocks"):
        pool.check()


def test_table_grows_by_whole_blocks_and_gives_them_back():
    pool = BlockPool(8)
    table = BlockTable(pool, 16)
    for tokens, blocks in ((0, 0), (1, 1), (15, 1), (1, 2), (47, 4)):
        assert table.append(tokens) == []
        assert len(table.blocks) == blocks
    assert table.num_tokens == 64
    table.free()
    assert (table.blocks, table.num_tokens, pool.num_free) == ([], 0, 7)


@pytest.mark.parametrize("held", [17, 20, 28])
def test_table_fork_copies_only_a_partly_filled_last_block(held):
    pool = BlockPool(8)
    table = BlockTable(pool, 16)
    table.append(held)
    branch = table.fork()
    ((source, destination),) = branch.append(20)
    assert source == table.blocks[1] and destination == branch.blocks[1]
    assert branch.blocks[0] == table.blocks[0] and len(branch.blocks) == 3
    assert table.append(1) == []

    full = BlockTable(pool, 16)
    full.append(16)
    assert full.fork().append(1) == []


def test_table_append_without_room_changes_nothing():
    pool = BlockPool(4)
    table = BlockTable(pool, 16)
    table.append(20)
    branch = table.fork()
    with pytest.raises(OutOfBlocksError, match="2 blocks were requested and 1 of 3 are left"):
        branch.append(13)
    assert branch.blocks == table.blocks and branch.num_tokens == 20
    assert [pool.references(b) for b in table.blocks] == [2, 2]


class PoolTraffic(RuleBasedStateMachine):
    """Random traffic against a model that is nothing but a list of tables, each a list of block ids."""

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(12, reserved=2)
        self.tables = []

    def owners(self, block):
        return sum(table.count(block) for table in self.tables)

    @rule(count=st.integers(0, 6))
    def allocate(self, count):
        free = self.pool.num_free
        if count > free:
            with pytest.raises(OutOfBlocksError, match=f"{count} blocks were requested and {free} of 10 are left"):
                self.pool.allocate(count)
            return
        blocks = self.pool.allocate(count)
        assert len(set(blocks)) == count
        assert not any(self.owners(block) for block in blocks)
        self.tables.append(blocks)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def fork(self, data):
        self.tables.append(self.pool.fork(data.draw(st.sampled_from(self.tables))))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def free(self, data):
        self.pool.free(self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1))))

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data())
    def write(self, data):
        table = data.draw(st.sampled_from([t for t in self.tables if t]))
        place = data.draw(st.integers(0, len(table) - 1))
        block, shared = table[place], self.owners(table[place]) > 1
        if shared and not self.pool.num_free:
            with pytest.raises(OutOfBlocksError):
                self.pool.writable(block)
            return
        table[place], copied = self.pool.writable(block)
        assert copied == shared
        assert self.owners(table[place]) == 1

    @rule(block=st.integers(-1, 13))
    def free_once_too_often(self, block):
        mentions = [block] * ((self.owners(block) if 2 <= block < 12 else 0) + 1)
        with pytest.raises(BlockError, match=rf"\b{block}\b" if block >= 0 else str(block)):
            self.pool.free(mentions)

    @invariant()
    def counts_agree(self):
        self.pool.check()
        used = {block for table in self.tables for block in table}
        assert self.pool.num_used == len(used)
        assert self.pool.num_free == 10 - len(used)
        assert all(self.pool.references(block) == self.owners(block) for block in range(2, 12))


TestPoolTraffic = PoolTraffic.TestCase
TestPoolTraffic.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)


def test_published_blocks_are_found_taken_and_evicted_last():
    pool = BlockPool(6)
    first, second, third = pool.allocate(3)
    assert pool.publish(first, "a") and pool.publish(second, "ab") and pool.publish(first, "a")
    assert pool.find(["a", "ab", "abc"]) == 2 and pool.find(["ab"]) == 1 and pool.find(["b", "a"]) == 0
    assert pool.take(["a", "x"]) == [first] and pool.references(first) == 2
    pool.free([first, second, third])
    assert (pool.num_kept, pool.num_free) == (1, 4)
    pool.free([first])
    assert (pool.num_kept, pool.num_free, pool.num_used) == (2, 5, 0)
    assert pool.num_kept_of(["a", "ab", "x"]) == 2
    assert pool.take(["a"]) == [first] and pool.num_kept == 1
    assert pool.num_kept_of(["a", "ab", "ab"]) == 1 and pool.num_free == 4
    pool.free([first])
    taken = pool.allocate(3)
    assert not {first, second} & set(taken) and pool.find(["a", "ab"]) == 2
    assert pool.allocate(1) == [second], "the least recently used goes first"
    assert pool.find(["a", "ab"]) == 1
    pool.check()


def test_the_end_of_a_freed_prefix_is_evicted_before_its_beginning():
    pool = BlockPool(5)
    blocks = pool.allocate(4)
    for block, key in zip(blocks, "abcd", strict=True):
        pool.publish(block, key)
    pool.free(blocks)
    for left in (3, 2, 1):
        pool.allocate(1)
        assert pool.find("abcd") == left


def test_a_key_belongs_to_one_content():
    pool = BlockPool(6)
    first, second = pool.allocate(2)
    assert pool.publish(first, "a") and not pool.publish(second, "a")
    with pytest.raises(BlockError, match=f"block {first} has key 'a' and was given 'b'"):
        pool.publish(first, "b")
    with pytest.raises(BlockError, match="key 7"):
        pool.publish(second, 7)
    pool.free([second])
    with pytest.raises(BlockError, match=f"not allocated: {second}"):
        pool.publish(second, "c")
    assert pool.writable(first) == (first, False)
    assert pool.find(["a"]) == 0, "a block that is written to has lost its content"
    assert pool.publish(first, "b")


def test_blocks_with_wrong_content_are_forgotten():
    pool = BlockPool(6)
    first, second = pool.allocate(2)
    pool.publish(first, "a")
    pool.publish(second, "b")
    with pytest.raises(BlockError, match="not allocated: 4"):
        pool.forget([first, 4])
    pool.forget([first])
    assert pool.take(["a"]) == [] and pool.take(["b"]) == [second]
    pool.free([first, second, second])
    assert pool.num_kept == 1


class ContentTraffic(RuleBasedStateMachine):
    """Requests over few prefixes; a simulated cache says what bytes every block holds."""

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(10)
        self.bytes = {}
        self.requests = []

    @precondition(lambda self: len(self.requests) < 4)
    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def begin(self, tokens):
        keys = ["".join(map(str, tokens[: i + 1])) for i in range(len(tokens))]
        found = self.pool.take(keys)
        assert all(self.bytes[block] == key for block, key in zip(found, keys, strict=False))
        try:
            fresh = self.pool.allocate(len(keys) - len(found))
        except OutOfBlocksError:
            self.pool.free(found)
            return
        owned = {block for request in self.requests for block in request}
        assert not owned & set(fresh), "bytes that somebody reads would be overwritten"
        for block, key in zip(fresh, keys[len(found) :], strict=True):
            self.bytes[block] = key
            self.pool.publish(block, key)
        self.requests.append([*found, *fresh])

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def write(self, data):
        request = data.draw(st.sampled_from(self.requests))
        place = data.draw(st.integers(0, len(request) - 1))
        try:
            request[place], _ = self.pool.writable(request[place])
        except OutOfBlocksError:
            return
        others = sum(r.count(request[place]) for r in self.requests) - 1
        assert not others
        self.bytes[request[place]] = "written"

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def end(self, data):
        self.pool.free(self.requests.pop(data.draw(st.integers(0, len(self.requests) - 1))))

    @invariant()
    def keys_tell_what_blocks_hold(self):
        self.pool.check()
        assert all(self.bytes[block] == key for block, key in self.pool._keys.items())
        owned = {block for request in self.requests for block in request}
        assert self.pool.num_used == len(owned)


TestContentTraffic = ContentTraffic.TestCase
TestContentTraffic.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
