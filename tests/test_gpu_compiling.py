"""The GPU kernels compile for NVIDIA's Hopper, on a machine without a GPU.

The interpreter runs what Triton's compiler refuses or crashes on. Nothing is launched here: what
would be is compiled, to the machine code.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu_support import INTERPRETED

from kvz.codecs import codec_from_options
from kvz.codecs.base import Codec
from kvz.codecs.pnmix import PnmixCodec
from kvz.codecs.pnmix_values import PnmixValueCodec
from kvz.formats.codecs.pnmix import KeyConfig, ValueConfig, build_mask

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")
if INTERPRETED:
    pytest.skip("the interpreter was chosen for this process", allow_module_level=True)

#: Compute capability, and threads of a warp.
HOPPER = (90, 32)
HINTS = ("num_warps", "num_stages", "maxnreg", "enable_fp_fusion")


class Compiler:
    """Stands for the launch of a kernel."""

    def __init__(self) -> None:
        self.compiled: list[str] = []

    def launch(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        hints = {name: named.pop(name) for name in HINTS if name in named}
        values = dict(zip(kernel.arg_names, args, strict=False)) | named
        constants = {p.name: values.pop(p.name) for p in kernel.params if p.is_constexpr}
        signature = {name: _type_of(value) for name, value in values.items()}
        aligned = {(kernel.arg_names.index(n),): [["tt.divisibility", 16]] for n in signature}
        source = triton.compiler.ASTSource(
            kernel, signature | dict.fromkeys(constants, "constexpr"), constants, aligned
        )
        target = triton.backends.compiler.GPUTarget("cuda", *HOPPER)
        binary = triton.compile(source, target=target, options=hints)
        assert binary.asm["cubin"][:4] == b"\x7fELF"
        self.compiled.append(kernel.__name__)


def _type_of(value: Any) -> str:
    if isinstance(value, int):
        return "i32"
    sign = "fp" if value.is_floating_point() else "i" if value.dtype.is_signed else "u"
    return f"*{sign}{8 * value.element_size()}"


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Compiler:
    found = Compiler()
    # what an earlier run left there would not be compiled
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    # tensors may lie in host memory
    monkeypatch.setattr("kvz.gpu.device.is_interpreted", lambda: True)
    monkeypatch.setattr(
        triton.runtime.jit.JITFunction, "run", lambda kernel, *a, **k: found.launch(kernel, *a, **k)
    )
    return found


def key_codec(**options: Any) -> Codec:
    return PnmixCodec(KeyConfig(pairing="none", **options))


#: Codec and head dim: whole words and single elements, one channel, a last slab that is not full.
CASES: dict[str, tuple[Codec, int]] = {
    "gaac": (codec_from_options("gaac", {}), 128),
    "gaac, odd": (codec_from_options("gaac", {"windows": "2/3/4"}), 63),
    "splitzip": (codec_from_options("splitzip", {}), 64),
    "lynx": (codec_from_options("lynx", {}), 128),
    "lynx, one channel": (codec_from_options("lynx", {}), 1),
    "lynx of the paper": (codec_from_options("lynx", {"preset": "paper"}), 80),
    "pnmix of the paper": (key_codec(group_tokens=128), 128),
    "pnmix by pages": (key_codec(group_tokens=64, page_tokens=1024), 64),
    "pnmix, one channel": (key_codec(group_tokens=32), 1),
    "pnmix, wide": (key_codec(high_bits=4, low_bits=2, group_tokens=24), 576),
    "pnmix values": (PnmixValueCodec(ValueConfig(bits=4)), 64),
}


@pytest.mark.parametrize("case", CASES)
def test_kernels_of_a_codec_compile(case: str, compiler: Compiler) -> None:
    from kvz.gpu.device_codec import DeviceDecoder, DeviceEncoder

    codec, head_dim = CASES[case]
    tensor = torch.zeros((2, 300, head_dim), dtype=torch.bfloat16)
    books = None
    if isinstance(codec, PnmixCodec):
        books = [build_mask(np.arange(2 * head_dim).reshape(2, head_dim) % 2 == 0)]
    encoder = DeviceEncoder([tensor], codec, codebooks=books)
    encoder.encode()
    decoder = DeviceDecoder.of(encoder, [tensor])
    decoder.decode()
    expected = {"encode_kernel", "decode_kernel"}
    if case.startswith("pnmix"):
        expected |= {"finish_kernel", "raw_kernel"}
    if isinstance(codec, PnmixCodec):
        expected.add("fit_kernel")
    assert expected <= set(compiler.compiled)
