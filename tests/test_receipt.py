"""The stored result of the GPU suite is well-formed, and the summary says what it does not cover."""

from __future__ import annotations

import json
import warnings

import pytest
import receipt

from torch_gemm._digest import source_digest

DIGEST = "0" * 64
GOOD = {
    "csrc_digest": DIGEST,
    "card": "NVIDIA H200",
    "driver": "580.1",
    "torch": "2.11.0",
    "cuda": "13.0",
    "python": "3.12.1",
    "date": "2026-01-31",
    "seconds": 100.5,
    "seed": 7,
    "passed": 10,
    "failed": 0,
    "skipped": 0,
    "skip_reasons": {},
    "failures": [],
    "gemm_problems": 12345,
}


def test_stored_receipt():
    if not receipt.PATH.exists():
        warnings.warn("tests/gpu_receipt.json is missing: the GPU tests never ran", stacklevel=1)
        return
    stored = receipt.read()
    for doubt in receipt.doubts(stored, source_digest()):
        warnings.warn(doubt, stacklevel=1)
    # A failure on sources that have changed since is old news; on these sources it is a failure.
    assert stored["failed"] == 0 or stored["csrc_digest"] != source_digest(), stored["failures"]


def test_round_trip(tmp_path):
    receipt.write(GOOD, tmp_path / "receipt.json")
    assert receipt.read(tmp_path / "receipt.json") == GOOD


def test_good_receipt_leaves_no_doubt():
    assert receipt.doubts(GOOD, DIGEST) == []


def test_changed_sources_are_reported():
    (doubt,) = receipt.doubts(GOOD, "1" * 64)
    assert "csrc/ has changed" in doubt


def test_failures_and_skips_are_reported():
    bad = GOOD | {
        "failed": 1,
        "failures": ["test_x"],
        "skipped": 1,
        "skip_reasons": {"test_y": "no tool"},
    }
    doubts = receipt.doubts(bad, DIGEST)
    assert len(doubts) == 2
    assert "test_x" in doubts[0]
    assert "test_y: no tool" in doubts[1]


@pytest.mark.parametrize(
    "change",
    [
        {"csrc_digest": "abc"},
        {"csrc_digest": None},
        {"passed": 0},
        {"passed": "10"},
        {"passed": True},
        {"failed": 1},
        {"skipped": 1},
        {"surprise": 1},
        {"gemm_problems": 1.5},
    ],
    ids=str,
)
def test_malformed_receipt_is_refused(change, tmp_path):
    path = tmp_path / "receipt.json"
    path.write_text(json.dumps(GOOD | change))
    with pytest.raises(ValueError, match="receipt"):
        receipt.read(path)
    with pytest.raises(ValueError, match="receipt"):
        receipt.write(GOOD | change, path)


def test_missing_field_is_refused(tmp_path):
    path = tmp_path / "receipt.json"
    path.write_text(json.dumps({name: GOOD[name] for name in GOOD if name != "card"}))
    with pytest.raises(ValueError, match="card"):
        receipt.read(path)


def test_text_that_is_not_json_is_refused(tmp_path):
    path = tmp_path / "receipt.json"
    path.write_text("{")
    with pytest.raises(ValueError, match="not JSON"):
        receipt.read(path)
