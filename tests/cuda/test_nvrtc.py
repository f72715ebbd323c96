"""Generated CUDA source compiles for GPUs: without warnings and spills, without a driver; what is missing is said."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import numpy as np
import pytest

import stagedtensor as st
from stagedtensor.benchmarks.ours import model
from stagedtensor.benchmarks.workloads import WORKLOADS, Gpt
from stagedtensor.codegen import loop_ir as ir
from stagedtensor.codegen.prelude import known_names
from stagedtensor.codegen.prelude.cuda import cuda_functions, cuda_names
from stagedtensor.errors import CompileError, ContextError
from stagedtensor.precision import f32
from stagedtensor.runtime.inspection import generated
from stagedtensor.runtime.nvrtc import KernelResources, compile_cuda
from tests.cuda.running import complaints, emitted
from tests.run.blocks import axis, contraction, load, module, store

needs_nvrtc = pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="CuPy is not installed")


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_contraction_compiles_for_each_family(arch: str) -> None:
    a, b, c = ir.Buffer("a", f32, (100, 70)), ir.Buffer("b", f32, (70, 90)), ir.Buffer("c", f32, (100, 90))
    source = emitted(module(contraction(a, b, c, (100, 90, 70), "NN")))
    binary = compile_cuda(source.text, arch)
    assert binary.data[:4] == b"\x7fELF"
    assert binary.warnings == ()
    (resources,) = binary.resources
    assert resources.spill_bytes == 0
    assert resources.shared_bytes == source.kernels[0].shared_bytes
    assert 0.2 < resources.occupancy(256, arch) <= 1


@needs_nvrtc
def test_warnings_spills_and_too_much_shared_memory_are_complained_of() -> None:
    """What every source of the tests is held to."""
    opening = 'extern "C" __global__ void __launch_bounds__(1024, 2) kernel(float *x) {'
    sums = "\n".join(f"float v{at} = x[{at}];" for at in range(64))
    uses = "\n".join(f"x[{at}] = v{at} * v{(7 * at + 3) % 64};" for at in range(64))
    sources = {
        "fine": f"{opening} x[threadIdx.x] = 1.0f / 0.0f; }}",
        "warning": f"{opening} int unused; x[threadIdx.x] = 1.0f; }}",
        "spill": f"{opening} {sums} __syncthreads(); {uses} }}",
        "too much shared data": f"{opening} __shared__ float s[13000]; s[threadIdx.x] = 1.0f; __syncthreads(); x[threadIdx.x] = s[threadIdx.x ^ 1]; }}",
    }
    for word, source in sources.items():
        found = complaints([source], ["sm_80", "sm_90"])
        assert {line[:5] for line in found} == (set() if word == "fine" else {"sm_80", "sm_90"}), (word, found)
        assert word == "fine" or any(word in line for line in found), found
    assert complaints([sources["spill"]], ["sm_90"], most_spilled=64)
    assert not complaints([sources["spill"]], ["sm_90"], most_spilled=10_000)


@needs_nvrtc
@pytest.mark.slow
@pytest.mark.parametrize("prec", ["f32", "bf16"])
def test_a_step_of_a_transformer_spills_nothing(prec: str) -> None:
    """Kernels of real extents: those of the other tests are small."""
    workload = WORKLOADS["gpt2_mini"]
    assert isinstance(workload, Gpt)
    workload = replace(workload, layers=1)
    with st.Session():
        *_, loss = model(workload, prec)
        step = st.sequence(st.grad_update(loss), st.sgd_update(loss, 0.1, momentum=0.9))
        source = generated(step, "cuda").source
    assert complaints([source], ["sm_90"]) == []


@needs_nvrtc
@pytest.mark.slow
def test_every_function_of_the_prelude_compiles() -> None:
    from stagedtensor.codegen.prelude import prelude_source

    text = prelude_source(known_names(), dialect="cuda") + cuda_functions(cuda_names())
    # unused functions leave no code: a binary of nothing, compiled in full
    binary = compile_cuda(text + '\nextern "C" __global__ void nothing(void) {}\n')
    assert all("declared but never referenced" in line for line in binary.warnings)


@needs_nvrtc
def test_routine_gives_ptx_and_cubin() -> None:
    with st.Session(), st.Context("cuda-emulated") as ctx:
        x = st.placeholder("x", output=[64])
        routine = ctx.compile(st.exp(x) + x)
        ctx.set_values(x, np.zeros(64, np.float32))
        assert ".target sm_80" in routine.ptx("sm_80")
        assert ".entry" in routine.ptx("sm_80")
        assert routine.cubin("sm_90")[:4] == b"\x7fELF"
        (resources,) = routine.resources()
        assert resources.registers > 0


@needs_nvrtc
def test_errors_name_the_user_s_line() -> None:
    x, y = ir.Buffer("x", f32, (8,)), ir.Buffer("y", f32, (8,))
    i = axis("i", 8)
    block = ir.Block("copy", (i,), (store(y, [i], load(x, i)),), origins=(ir.Origin("y =: x", "model.py:7"),))
    source = emitted(module(block))
    with pytest.raises(CompileError, match=r"model\.py:7: y =: x"):
        compile_cuda(source.text.replace("y[i] =", "y[wrong] ="), locate=source.locate)


def test_architectures_are_checked_before_anything_is_loaded() -> None:
    with pytest.raises(CompileError, match="sm_90"):
        compile_cuda("", "hopper")


@needs_nvrtc
def test_architectures_that_the_compiler_does_not_know_are_named() -> None:
    with pytest.raises(CompileError, match=r"NVRTC \d+\.\d+.* does not know the GPU architecture 'sm_999'"):
        compile_cuda('extern "C" __global__ void kernel() {}', "sm_999")


def test_missing_packages_are_said_with_the_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CompileError, match=r'pip install "stagedtensor\[cuda13\]"'):
        compile_cuda("")


def test_other_devices_have_no_cuda_source() -> None:
    with st.Session(), st.Context("reference") as ctx:
        x = st.placeholder("x", output=[4])
        routine = ctx.compile(st.exp(x))
        with pytest.raises(ContextError, match="cuda-emulated"):
            routine.ptx()


def test_occupancy_follows_registers_and_shared_memory() -> None:
    assert KernelResources("k", 32, 0, 0).occupancy(256) == 1.0
    assert KernelResources("k", 128, 0, 0).occupancy(256) == 0.25
    assert KernelResources("k", 32, 100 * 1024, 0).occupancy(256) == 0.25
    assert KernelResources("k", 255, 0, 0).occupancy(1024) == 0.0


def test_same_module_gives_the_same_text() -> None:
    def text() -> str:
        a, b, c = ir.Buffer("a", f32, (20, 17)), ir.Buffer("b", f32, (17, 9)), ir.Buffer("c", f32, (20, 9))
        return emitted(module(contraction(a, b, c, (20, 9, 17), "NN"))).text

    assert text() == text()
