"""What `template` implements, and for which calls: claims only. Importing this loads no torch and starts nothing."""

from rlkernel_core import Backend, Impl, Requires

backend = Backend(
    name="template",
    api=(2, 0),  # the plugin API it was written for; another rlkernel refuses it in words instead of misreading it
    impls=(
        Impl(
            op="logprob@1",
            target="rlkernel_template.logprob:logprob",
            requires=Requires(device=("cpu",), dtypes=("bfloat16", "float16", "float32")),
            supports={"deterministic", "entropy", "grad", "lse", "mask", "per_row_temperature"},
            check="rlkernel_template.logprob:fits",
        ),
        Impl(
            op="advantage@1",
            target="rlkernel_template.advantage:advantage",
            requires=Requires(device=("cpu",), dtypes=("bfloat16", "float16", "float32")),
            supports={
                "ddof",
                "deterministic",
                "eps_mode:threshold",
                "eps_mode:var_add",
                "eps_mode:var_clamp",
                "kind:grpo",
                "singleton_zero",
                "stats",
            },
        ),
        Impl(
            op="whiten@1",
            target="rlkernel_template.whiten:whiten",
            requires=Requires(device=("cpu",), dtypes=("bfloat16", "float16", "float32")),
            supports={
                "ddof",
                "deterministic",
                "eps_mode:std_add",
                "eps_mode:threshold",
                "eps_mode:var_clamp",
                "mask",
            },
        ),
    ),
    self_test="rlkernel_template.self_test:self_test",
)
