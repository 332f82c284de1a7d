"""Stop tokens: responses end at those of their request only.

SGLang either stops at the model's end-of-sequence tokens too, or (`ignore_eos`) at none at all.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.schedule_batch import FINISH_MATCHED_TOKEN


def ends(request: Any, new_accepted_tokens: list[int]) -> bool:
    """Replace `Req._check_token_based_finish`."""
    for number, token in enumerate(new_accepted_tokens):
        if token in (request.sampling_params.stop_token_ids or ()):
            request.finished_reason = FINISH_MATCHED_TOKEN(matched=token)
            request.finished_len = len(request.output_ids) - len(new_accepted_tokens) + number + 1
            return True
    return False
