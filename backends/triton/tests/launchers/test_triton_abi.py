"""How a compiled kernel is launched, compared with what the installed Triton does."""

import inspect
import re
import threading
import warnings
from types import SimpleNamespace

import pytest
import triton
from triton.backends.amd.driver import HIPLauncher
from triton.backends.nvidia.driver import CudaLauncher
from triton.compiler.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from rlkernel_core.errors import RLKernelWarning
from rlkernel_triton.launchers import triton_abi
from rlkernel_triton.launchers.triton_abi import ATTRIBUTES, FORMS, entry_of, version_of

INSTALLED = version_of(triton.__version__)


@pytest.fixture(autouse=True)
def fresh():
    triton_abi.warn_once.cache_clear()
    yield
    triton_abi.warn_once.cache_clear()


def test_the_installed_version_is_known():
    assert INSTALLED in FORMS


@pytest.mark.parametrize("launcher,kind", [(CudaLauncher, "cuda"), (HIPLauncher, "hip")])
def test_the_launcher_in_c_is_called_as_its_form_says(launcher, kind):
    source = " ".join(inspect.getsource(launcher.__call__).split())
    assert [FORMS[INSTALLED][kind]] == re.findall(r"self\.launch\((.*?)\)", source)


def test_the_jit_calls_a_compiled_kernel_in_the_common_form():
    source = " ".join(inspect.getsource(JITFunction.run).split())
    assert (
        "kernel.run(grid_0, grid_1, grid_2, stream, kernel.function, kernel.packed_metadata, launch_metadata, "
        "knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook, *bound_args.values())"
    ) in source


def test_the_jit_makes_launch_metadata_from_grid_stream_and_every_argument():
    assert list(inspect.signature(CompiledKernel.launch_metadata).parameters) == ["self", "grid", "stream", "args"]


def test_a_compiled_kernel_has_the_attributes_that_are_used():
    source = inspect.getsource(CompiledKernel)
    assert not [n for n in ATTRIBUTES if f"self.{n} = " not in source and f"def {n}(" not in source]


def test_the_conditions_of_a_direct_launch_are_attributes_of_the_launchers():
    names = {"cuda": {"global_scratch_size", "launch_cooperative_grid", "launch_pdl", "launch"}, "hip": {"launch"}}
    for kind, launcher in (("cuda", CudaLauncher), ("hip", HIPLauncher)):
        source = inspect.getsource(launcher.__init__)
        assert not [n for n in names[kind] if f"self.{n} = " not in source], kind


@pytest.mark.parametrize(
    "text,expected",
    [("3.6.0", (3, 6)), ("3.9.0+git1f", (3, 9)), ("3.5.1.post2", (3, 5)), ("main", (0, 0)), ("3.x", (0, 0))],
)
def test_versions_are_read(text, expected):
    assert expected == version_of(text)


def compiled(kind="cuda", *, form=(3, 6), **attributes):
    """A compiled kernel as a version makes it, whose launcher in C writes down what it is given."""
    calls = []

    class Run:
        """As CudaLauncher."""

        global_scratch_size = profile_scratch_size = 0
        launch_cooperative_grid, launch_pdl = "cooperative", "pdl"
        arg_annotations, kernel_signature, warp_size = "annotations", "signature", 64

        def launch(self, *args):
            calls.append(args)

        def __call__(self, *args):
            calls.append(("through __call__", *args))

    run = Run()
    for name, value in attributes.items():
        setattr(run, name, value)
    made = SimpleNamespace(
        run=run, function="function", packed_metadata="packed", launch_metadata=lambda *_: "metadata",
        metadata=SimpleNamespace(target=SimpleNamespace(backend=kind)),
    )  # fmt: skip
    return made, calls, f"{form[0]}.{form[1]}.0"


def launched(entry, *args):
    entry.call(1, 2, 3, "stream", *entry.middle, *(args if entry.spread else (args,)))


HOOKS = ("packed", None, None, None)
GRID = (1, 2, 3, "stream", "function")


@pytest.mark.parametrize(
    "form,kind,expected",
    [
        ((3, 4), "cuda", (*GRID, "cooperative", "pdl", None, *HOOKS, "x", 5)),
        ((3, 4), "hip", ("cooperative", *GRID, *HOOKS, "x", 5)),
        ((3, 5), "cuda", (*GRID, "cooperative", "pdl", None, None, *HOOKS, "x", 5)),
        ((3, 5), "hip", ("cooperative", *GRID, None, *HOOKS, "x", 5)),
        ((3, 6), "cuda", (*GRID, "cooperative", "pdl", None, None, *HOOKS, "x", 5)),
        ((3, 6), "hip", ("cooperative", *GRID, None, *HOOKS, "x", 5)),
        ((3, 7), "cuda", (*GRID, "cooperative", "pdl", *HOOKS, None, None, "annotations", "signature", ("x", 5))),
        ((3, 7), "hip", ("cooperative", *GRID, None, *HOOKS, 64, "annotations", "signature", ("x", 5))),
        ((3, 8), "cuda", (*GRID, "cooperative", "pdl", *HOOKS, None, None, "annotations", "signature", ("x", 5))),
        ((3, 8), "hip", ("cooperative", *GRID, None, None, *HOOKS, 64, "annotations", "signature", ("x", 5))),
        ((3, 9), "cuda", (*GRID, "cooperative", "pdl", *HOOKS, None, None, "annotations", "signature", ("x", 5))),
        ((3, 9), "hip", ("cooperative", *GRID, None, None, *HOOKS, 64, "annotations", "signature", ("x", 5))),
    ],
)
def test_the_launcher_in_c_gets_its_arguments_in_the_order_of_its_version(form, kind, expected):
    made, calls, version = compiled(kind, form=form)
    launched(entry_of(made, version), "x", 5)
    assert [expected] == calls


@pytest.mark.parametrize("more", [{"global_scratch_size": 64}, {"profile_scratch_size": 8}, {"gsan_enabled": True}])
@pytest.mark.parametrize("form", FORMS)
def test_a_kernel_that_needs_more_at_a_launch_goes_through_the_launcher_in_python(form, more):
    made, calls, version = compiled(form=form, **more)
    launched(entry_of(made, version), "x", 5)
    assert [("through __call__", *GRID, *HOOKS, "x", 5)] == calls


def test_an_unknown_version_goes_through_the_jit_with_one_warning():
    made, _, _ = compiled()
    with pytest.warns(RLKernelWarning, match=r"Triton 4\.0\.0 .* Kernels run through Triton's JIT: slower, and right"):
        assert entry_of(made, "4.0.0") is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert entry_of(made, "4.0.0") is None


@pytest.mark.parametrize("lacking", ATTRIBUTES)
def test_a_compiled_kernel_that_lacks_an_attribute_goes_through_the_jit_with_a_warning(lacking):
    made, _, version = compiled()
    delattr(made, lacking)
    with pytest.warns(RLKernelWarning, match=f"not as expected.*{lacking}"):
        assert entry_of(made, version) is None


def test_a_launcher_that_lacks_what_its_form_names_is_called_in_python():
    made, calls, version = compiled("cuda", form=(3, 9))
    made.run = lambda *args: calls.append(args)
    launched(entry_of(made, version), "x", 5)
    assert [(*GRID, *HOOKS, "x", 5)] == calls


def test_a_thread_waits_for_the_kernel_that_another_one_loads():
    made, _, version = compiled()
    loading, loaded = threading.Event(), threading.Event()

    class Lazy:
        """As CompiledKernel: `run` is there before `function`."""

        function = None
        launch_metadata, packed_metadata, metadata = made.launch_metadata, made.packed_metadata, made.metadata

        @property
        def run(self):
            if not loading.is_set():
                loading.set()
                loaded.wait(60)
                self.function = "function"
            return made.run

    lazy, found = Lazy(), []
    threads = [threading.Thread(target=lambda: found.append(entry_of(lazy, version))) for _ in range(2)]
    threads[0].start()
    loading.wait(60)
    threads[1].start()
    threads[1].join(0.2)  # as long as it might take to find no function
    loaded.set()
    for thread in threads:
        thread.join()
    assert [entry.middle[0] for entry in found] == ["function", "function"]
