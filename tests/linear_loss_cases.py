"""One batch of a small head, and the loss that torch makes from its whole logits."""

import torch

from rlkernel_torch.direct import linear_policy_loss, policy_loss
from tests.policy_batches import same

B, T, D, V = 5, 17, 6, 1031  # 85 rows: more than one block; two tiles of the vocabulary
HEAD = {"temperature": 0.7, "softcap": 9.0, "logit_scale": 1.3}


class Case:
    """One batch of a small head, in float64 unless told otherwise."""

    def __init__(self, seed=0, dtype=torch.float64, frozen=(), bias=True, off_policy=0.3):
        g = torch.Generator().manual_seed(seed)

        def normal(*shape):
            return torch.randn(*shape, generator=g, dtype=torch.float64)

        self.hidden, self.weight, self.bias = normal(B, T, D), normal(V, D), normal(V) if bias else None
        self.ids = torch.randint(V, (B, T), generator=g)
        self.mask = torch.rand(B, T, generator=g) < 0.8
        self.mask[2] = False
        with torch.no_grad():
            lp = self.torch_logprob(**HEAD)[0]
        self.old, self.ref, self.roll = (lp + off_policy * normal(B, T) for _ in range(3))
        self.adv = normal(B)
        for name in ("hidden", "weight", "bias"):
            x = getattr(self, name)
            if x is not None:
                setattr(self, name, x.to(dtype).requires_grad_(name not in frozen))
        self.old, self.ref, self.roll, self.adv = (x.to(dtype) for x in (self.old, self.ref, self.roll, self.adv))

    def torch_logprob(self, temperature=1.0, softcap=None, logit_scale=1.0):
        z = self.hidden @ self.weight.T
        z = (z if self.bias is None else z + self.bias) * logit_scale
        if softcap is not None:
            z = softcap * torch.tanh(z / softcap)
        p = torch.log_softmax(z / temperature, -1)
        return p.gather(-1, self.ids[..., None])[..., 0], -(p.exp() * p).sum(-1)

    def arguments(self, ref=False, roll=False, old=True, **options):
        return (
            (self.old if old else None, self.adv),
            {
                "mask": self.mask,
                "ref_logprob": self.ref if ref else None,
                "rollout_logprob": self.roll if roll else None,
                **options,
            },
        )

    def gradients(self, loss, scale=1.0):
        operands = [x for x in (self.hidden, self.weight, self.bias) if x is not None and x.requires_grad]
        return torch.autograd.grad(loss * scale, operands)

    def plain(self, head=None, entropy=False, **options):
        lp, H = self.torch_logprob(**(HEAD if head is None else head))
        args, kwargs = self.arguments(**options)
        return policy_loss(lp, *args, entropy=H if entropy else None, **kwargs)

    def fused(self, head=None, limit=None, entropy=False, **options):
        args, kwargs = self.arguments(**options)
        return linear_policy_loss(
            self.hidden,
            self.weight,
            self.ids,
            *args,
            bias=self.bias,
            entropy=entropy,
            max_workspace_bytes=limit,
            **(HEAD if head is None else head),
            **kwargs,
        )


def agree(case, rtol=1e-10, **options):
    limit = options.pop("limit", None)
    got, want = case.fused(limit=limit, **options), case.plain(**options)
    same(got.loss, want.loss, rtol=rtol)
    for name, value in vars(want.stats).items():
        if value is None:
            assert getattr(got.stats, name) is None, name
        else:
            same(getattr(got.stats, name), value, rtol=rtol, atol=1e-12)
    for one, two in zip(case.gradients(got.loss, 1.7), case.gradients(want.loss, 1.7), strict=True):
        same(one, two, rtol=1e-9, atol=1e-12)
    return got
