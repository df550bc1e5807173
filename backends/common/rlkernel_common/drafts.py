"""Drafts of a speculative step as the penalties of each row of logits see them.

Legend: B requests · K drafts of all of them · M = K + B rows of the target's logits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rlkernel_common.requests import Requests
from rlkernel_core.spec.sampling import Penalties


class DraftRows(NamedTuple):
    """What the rows of the target's logits stand for; every tensor is [M]."""

    request: Tensor
    place: Tensor  # drafts of the request before this row
    bonus: Tensor  # bool, the row behind the last draft
    source: Tensor  # place of the row's draft among all drafts; K on bonus rows
    draft: Tensor  # id of the row's draft; 0 on bonus rows


def with_drafts(requests: Requests, rows: DraftRows, draft_ids: Tensor) -> Requests:
    """The history of each row with the drafts before it."""
    if requests.history is None:
        return requests
    history = requests.history
    M, K = rows.request.shape[0], draft_ids.shape[0]
    position = torch.arange(K, device=draft_ids.device)
    # Drafts of the same request are the `place` ones right before the row's own.
    end = torch.arange(M, device=draft_ids.device) - rows.request
    before = (position < end[:, None]) & (position >= (end - rows.place)[:, None])
    ids = draft_ids.long().expand(M, K)
    if history.output_ids is None:
        return requests._replace(history=Penalties(None, None, None, history.prompt_bits, ids, before.long()))
    counts = torch.ones_like(history.output_ids) if history.output_counts is None else history.output_counts
    return requests._replace(
        history=Penalties(
            prompt_bits=history.prompt_bits,
            output_ids=torch.cat((history.output_ids.long(), ids), 1),
            output_counts=torch.cat((counts.long(), before.long()), 1),
        )
    )
