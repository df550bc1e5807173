"""A bundle that is not as it was written: what reads it finds out, and says how to make a new one."""

import zipfile

import pytest

from rlkernel_triton.aot.bundle import Bundle, BundleError, write_bundle
from rlkernel_triton.aot.configurations import Code, Configuration


def test_a_changed_byte_anywhere_in_a_bundle_changes_no_code_and_is_told(tmp_path) -> None:
    whole, path = tmp_path / "whole.zip", tmp_path / "x.zip"
    code = Code(Configuration("m:kernel", (), ()), "sm_87", "kernel", 0, 0, 1, 0, "s", (), {"cubin": ""})
    write_bundle(whole, [(code, {"cubin": b"machine code"})], {})
    data = whole.read_bytes()

    def read(at) -> bytes:
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        found = Bundle(path)
        return b"".join(found.read(c.files["cubin"]) for c in found.codes)

    told = 0
    for at in range(0, len(data), 3):
        try:
            assert read(at) == b"machine code"  # bytes of dates and the like
        except BundleError:
            told += 1
    assert told > len(data) // 6


def test_a_bundle_that_is_written_again_leaves_its_readers_the_old_one(tmp_path) -> None:
    code = Code(Configuration("m:kernel", (), ()), "sm_87", "kernel", 0, 0, 1, 0, "s", (), {"cubin": ""})
    path = tmp_path / "x.zip"
    old = write_bundle(path, [(code, {"cubin": b"old"})], {})
    new = write_bundle(path, [(code, {"cubin": b"new"})], {})
    assert [found.read(found.codes[0].files["cubin"]) for found in (old, new)] == [b"old", b"new"]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("content", [b"[]", b"{}", b"\xff"])
def test_a_zip_whose_description_is_of_something_else_is_no_bundle(content, tmp_path) -> None:
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as file:
        file.writestr("bundle.json", content)
    with pytest.raises(BundleError, match="rlkernel aot build --target sm_87 --out x.zip"):
        Bundle(tmp_path / "x.zip")
