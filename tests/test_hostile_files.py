"""Files that were made to harm: what they claim is not believed, and nothing is allocated or opened for it."""

from __future__ import annotations

import hashlib
import json
import lzma
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rlkernel import checkpoints
from rlkernel_core import tensor_file
from rlkernel_core.errors import FileError

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("name", ["../out.safetensors", "/etc/passwd", "sub/../../out.safetensors", "link.safetensors"])
def test_an_index_names_files_of_its_folder_alone(tmp_path, name) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a": torch.ones(1)}, tmp_path / "out.safetensors")
    (folder / "link.safetensors").symlink_to(tmp_path / "out.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(FileError, match="which is no file in"), checkpoints.opened(folder):
        pass


def test_a_snapshot_of_the_hub_whose_files_are_links_to_blobs_is_opened(tmp_path) -> None:
    blobs, snapshot = tmp_path / "models--x" / "blobs", tmp_path / "models--x" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    save_file({"a": torch.ones(1)}, blobs / "0123")
    (snapshot / "model.safetensors").symlink_to(Path("../../blobs/0123"))
    (snapshot / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model.safetensors"}}))
    with checkpoints.opened(snapshot) as source:
        assert list(source.entries) == ["a"]


def header(rows: object, data: bytes = b"") -> bytes:
    text = rows if isinstance(rows, bytes) else json.dumps(rows).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "ends within its header"),
        (struct.pack("<Q", 1 << 60) + b"{}", "ends within its header"),
        (header(b"\xff"), "no UTF-8"),
        (header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 8]}}, bytes(8)), "cut off"),
        (header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, bytes(4)), "ends within it"),
        (header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, bytes(8)), "4 bytes more"),
        (header({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 0]}}), "no shape"),
        (header({"a": {"dtype": "F32", "shape": [0, 1 << 61], "data_offsets": [0, 0]}}), "no shape"),
        (header({"a": {"dtype": "F32", "shape": [1] * 65, "data_offsets": [0, 4]}}, bytes(4)), "no shape"),
        (header({"a": {"dtype": "X9", "shape": [], "data_offsets": [0, 4]}}, bytes(4)), "has dtype 'X9'"),
        (header({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}, "b": {"dtype": "U8", "shape": [1],
                 "data_offsets": [0, 1]}}, bytes(1)), "b: is cut off, or does not lie where the one before it ends"),
    ],
)  # fmt: skip
def test_a_header_of_safetensors_that_lies_is_refused(tmp_path, content, said) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(FileError, match=said):
        tensor_file.read_header(path)


def gguf(tensors: int = 0, pairs: int = 0, rest: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, pairs) + rest


TEXT = struct.pack("<Q", 1) + b"k"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (gguf(version=9), "version 9"),
        (gguf(tensors=1 << 63), "tensors; at most"),
        (gguf(pairs=1 << 63), "cut off"),
        (gguf(pairs=1, rest=struct.pack("<Q", 1 << 40)), "a name of 1099511627776 bytes"),
        (gguf(pairs=1, rest=TEXT + struct.pack("<IIQ", 9, 0, 1 << 62)), "cut off"),
        (gguf(pairs=1, rest=TEXT + struct.pack("<I", 9) + struct.pack("<IQ", 9, 2) * 50), "a value of type 9"),
        (gguf(pairs=1, rest=TEXT + struct.pack("<I", 99)), "a value of type 99"),
        (gguf(tensors=1, rest=TEXT + struct.pack("<IQIQ", 1, 64, 99, 0)), "of type 99"),
        (gguf(tensors=1, rest=TEXT + struct.pack("<I", 1 << 30)), "dimensions"),
        (gguf(tensors=1, rest=TEXT + struct.pack("<IQIQ", 1, 33, 8, 0)), "no multiple of the 32"),
        (gguf(tensors=1, rest=TEXT + struct.pack("<IQIQ", 1, 64, 0, 1 << 60)), "cut off within 'k'"),
        (gguf(tensors=2, rest=(TEXT + struct.pack("<IQIQ", 1, 0, 0, 0)) * 2 + bytes(64)), "two tensors 'k'"),
    ],
)
def test_a_header_of_gguf_that_lies_is_refused(tmp_path, content, said) -> None:
    pytest.importorskip("gguf")
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(FileError, match=said), checkpoints.opened(path):
        pass


def test_a_report_does_not_choose_what_is_imported(tmp_path) -> None:
    from rlkernel_conformance import documents, evidence
    from rlkernel_conformance.report import content_hash

    content = documents.read(ROOT / "conformance" / "reports" / "torch") | {
        "backend": "hers",
        "manifest": "trap:backend",
    }
    (tmp_path / "trap.py").write_text(f"open({str(tmp_path / 'sprung')!r}, 'w')")
    (tmp_path / "report.json").write_text(json.dumps(content | {"hash": content_hash(content)}))
    source = (
        "import sys; from pathlib import Path; from rlkernel_conformance import documents, evidence\n"
        "print(evidence.manifest_of(documents.read(Path(sys.argv[1]))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", source, str(tmp_path)], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert (done.stdout, (tmp_path / "sprung").exists()) == ("None\n", False)
    assert evidence.manifest_of(documents.read(ROOT / "conformance" / "reports" / "torch")) is not None


def test_a_suite_that_is_a_path_names_no_picture(tmp_path) -> None:
    from rlkernel_bench.results import content_hash, read

    from tests.test_bench_results import candidate, content

    made = content(candidate())
    made["results"][0]["suite"] = "../../out"
    (tmp_path / "results.json").write_text(json.dumps(made | {"hash": content_hash(made)}))
    with pytest.raises(FileError, match=r"results\[0\]: has a suite that is no name"):
        read(tmp_path)


def bundle_of(path: Path, pack: bytes) -> None:
    """A bundle whose one pack is these bytes, with hashes that fit."""
    from rlkernel_triton.aot.bundle import write_bundle
    from rlkernel_triton.aot.configurations import Code, Configuration

    code = Code(Configuration("m:kernel", (), ()), "sm_87", "kernel", 0, 0, 1, 0, "s", (), {"cubin": ""})
    write_bundle(path, [(code, {"cubin": b"machine code"})], {})
    with zipfile.ZipFile(path) as file:
        entries = {name: file.read(name) for name in file.namelist()}
    (name,) = [name for name in entries if name.endswith(".xz")]
    description = json.loads(entries["bundle.json"])
    description["entries"][name] = hashlib.sha256(pack).hexdigest()
    entries |= {name: pack, "bundle.json": json.dumps(description).encode()}
    with zipfile.ZipFile(path, "w") as file:
        for name, data in entries.items():
            file.writestr(name, data)


def test_a_pack_that_grows_without_end_is_not_decompressed(tmp_path) -> None:
    bundle = pytest.importorskip("rlkernel_triton.aot.bundle")
    bundle_of(tmp_path / "x.zip", lzma.compress(bytes(80 << 20), preset=0))
    assert (tmp_path / "x.zip").stat().st_size < 1 << 18
    found = bundle.Bundle(tmp_path / "x.zip")
    with pytest.raises(bundle.BundleError, match="cut off, or larger than 67108864 bytes"):
        found.read(found.codes[0].files["cubin"])


def test_a_zip_that_claims_a_long_list_is_not_opened(tmp_path) -> None:
    bundle = pytest.importorskip("rlkernel_triton.aot.bundle")
    bundle_of(tmp_path / "x.zip", lzma.compress(b"machine code"))
    data = bytearray((tmp_path / "x.zip").read_bytes())
    data[-10:-6] = struct.pack("<L", 1 << 31)  # bytes of the list of entries
    (tmp_path / "x.zip").write_bytes(data)
    with pytest.raises(bundle.BundleError, match="does not end as a bundle does"):
        bundle.Bundle(tmp_path / "x.zip")
