"""What travels between processes: digests as bytes."""

from __future__ import annotations

import gzip
import json
import pickle
import zlib
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from tracedoc.spans import Int64Array, Spans
from tracedoc.step.codec import decode, encode, share
from tracedoc.step.rank_digest import RankDigest, decoded_digest
from tracedoc.testing import TraceBuilder
from tracedoc.trace.kernels import KernelCategory
from tracedoc.values import Failed, Unknown
from tracedoc.worker import digest_file

LEAST, MOST = np.iinfo(np.int64).min, np.iinfo(np.int64).max


class Columns(msgspec.Struct, frozen=True, eq=False):
    """One column of each kind that digests hold."""

    times: Int64Array
    small: npt.NDArray[np.unsignedinteger]
    flags: npt.NDArray[np.bool_]
    rates: npt.NDArray[np.float64]


class Texts(msgspec.Struct, frozen=True):
    """What is no column."""

    names: tuple[str, ...]
    seen: frozenset[str]


@pytest.fixture(scope="module")
def digest(sample_traces: Path) -> RankDigest:
    return digest_file(str(sample_traces / "synthetic_fsdp2_fine_wrapping" / "rank-0.json.gz"))


def test_numbers_beyond_64_bits_do_not_stop_a_digest(sample_traces: Path, tmp_path: Path) -> None:
    huge = 10**30
    packed = (sample_traces / "cpu_ddp_straggler" / "rank-0.json.gz").read_bytes()
    content = json.loads(gzip.decompress(packed))
    content["distributedInfo"]["pg_config"][0] |= {"ranks": [0, huge], "pg_size": huge}
    for event in content["traceEvents"]:
        event["name"] = event["name"].replace("ProfilerStep#", f"ProfilerStep#{huge}")
        if "Input Dims" in event.get("args", {}):
            event["args"]["Input Dims"] = [[huge, 10**12], [10**12, huge]]
        if "Group size" in event.get("args", {}):
            event["args"] |= {"Group size": huge, "Process Group Ranks": f"[0, {huge}]", "Src Rank": huge}
    trace = tmp_path / "rank-0.json"
    trace.write_text(json.dumps(content))
    digest = digest_file(str(trace))
    assert decoded_digest(encode(digest)).groups[0].ranks == ()
    assert digest.step_source != "profiler"


@pytest.mark.parametrize(
    "times", [[], [5], [LEAST, MOST, 0, LEAST, -1, MOST], [1_700_000_000_000_000_000, 3, 3]]
)
def test_columns_come_back_as_they_were(times: list[int]) -> None:
    sent = Columns(
        np.array(times, dtype=np.int64),
        np.arange(12, dtype=np.uint16).reshape(4, 3)[::2],
        np.array([True, False, True]),
        np.array([0.1, -np.inf, 1e300]),
    )
    back = decode(encode(sent), Columns)
    for name in Columns.__struct_fields__:
        np.testing.assert_array_equal(getattr(back, name), getattr(sent, name), strict=True)


def _plain(digest: RankDigest) -> object:
    """Columns and fields; what is not known (NaN) is a word, for it equals nothing."""
    return msgspec.to_builtins(
        digest, enc_hook=lambda column: [*map(str, column.tolist())], order="deterministic"
    )


def test_a_digest_comes_back_as_it_was(digest: RankDigest) -> None:
    back = pickle.loads(pickle.dumps(digest))
    assert _plain(back) == _plain(digest)
    assert back.spans("exposed_comm_ms") == digest.spans("exposed_comm_ms")
    assert len(back.spans("exposed_comm_ms")) > 0


def test_facts_come_back_as_they_were(digest: RankDigest) -> None:
    facts = {"a": 1, "b": 1.0, "c": True, "d": "text", "e": Unknown("why"), "f": Failed("error", "where")}
    back = decoded_digest(encode(msgspec.structs.replace(digest, facts=facts))).facts
    assert back == facts
    assert list(map(type, back.values())) == list(map(type, facts.values()))


def test_what_is_cut_off_or_changed_is_no_digest(digest: RankDigest) -> None:
    data = encode(digest)
    for end in (0, 1, len(data) // 2, len(data) - 1):
        with pytest.raises(ValueError):
            decoded_digest(data[:end])
    with pytest.raises(ValueError):
        decoded_digest(data[:100] + bytes([data[100] ^ 1]) + data[101:])


@pytest.mark.parametrize(
    "column",
    [
        ["|O", [1], bytes(8)],  # Python objects
        ["<f8", [1], bytes(8)],  # not what the field holds
        ["<i8", [2], bytes(8)],  # fewer than it says
        ["<i8", [1 << 60], b""],
        ["<i8", [-1], bytes(8)],
        ["<i8", [-1, -1], bytes(8)],
        ["<i3", [1], bytes(3)],
        ["<i8", ["one"], bytes(8)],
        5,
    ],
)
def test_columns_of_strangers_are_checked(column: object) -> None:
    good = ["<i8", [1], bytes(8)]
    assert decode(zlib.compress(msgspec.msgpack.encode({"starts": good, "ends": good})), Spans).ends == [0]
    data = zlib.compress(msgspec.msgpack.encode({"starts": good, "ends": column}))
    with pytest.raises(ValueError):
        decode(data, Spans)


def test_a_digest_whose_parts_do_not_fit_together_is_none(digest: RankDigest) -> None:
    for wrong in (
        {"judged": len(digest.steps)},
        {"gradients": digest.gradients[1:]},
        {"collectives": digest.collectives.with_kinds(())},
    ):
        with pytest.raises(ValueError, match="do not fit together"):
            decoded_digest(encode(msgspec.structs.replace(digest, **wrong)))


def test_ranks_share_texts_and_columns() -> None:
    one, other, third = (
        decode(encode(Spans.from_pairs([(begin, 9), (20, 30)])), Spans) for begin in (5, 5, 7)
    )
    known: dict[object, object] = {}
    first, second, last = (share(spans, known) for spans in (one, other, third))
    assert second.starts is first.starts
    assert last.starts is not first.starts
    assert last.ends is first.ends
    assert last.starts.tolist() == [7, 20]
    texts = [share(Texts(("a" * n, "b"), frozenset({"c"})), known) for n in (3, 3, 4)]
    assert texts[1].names[0] is texts[0].names[0]
    assert share(("attention", KernelCategory.ATTENTION), known)[1] is KernelCategory.ATTENTION
    assert texts[2] == Texts(("aaaa", "b"), frozenset({"c"}))


def test_halves_of_surrogate_pairs_cost_only_their_letter(tmp_path: Path) -> None:
    texts = Texts(("a\ud800b", "plain"), frozenset({"\udfff"}))
    assert decode(encode(texts), Texts) == Texts(("a?b", "plain"), frozenset({"?"}))
    builder = TraceBuilder(0, 2, device=None)
    for number in range(3):
        builder.step(number, number * 10, number * 10 + 10).host("NAME", number * 10 + 1, number * 10 + 9)
    file = builder.write(tmp_path / "rank-0.json")
    file.write_bytes(file.read_bytes().replace(b"NAME", rb"aten::\ud800"))
    digest = digest_file(str(file))
    assert decoded_digest(encode(digest)).facts.keys() == digest.facts.keys()
