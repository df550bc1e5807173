"""What the backend `acme` brings and implements: claims only. Importing this loads no torch."""

from rlkernel_core import Backend, Impl, Operator, Requires

backend = Backend(
    name="acme",
    api=(2, 0),
    operators=(Operator(spec="acme_relu2.spec:SPEC", attacks="acme_relu2.attacks"),),
    impls=(
        Impl(
            op="acme_relu2@1",
            target="acme_relu2.run:relu2",
            requires=Requires(device=("cpu", "cuda"), dtypes=("bfloat16", "float16", "float32")),
            supports={"grad", "deterministic", "batch_invariant"},
        ),
    ),
)
