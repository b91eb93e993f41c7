"""Every model case that the tests and the GPU script run, and what must become of its calls.

Importing this needs neither pytest nor the model libraries; building a case needs the libraries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from tests.models import zoo


@dataclass(frozen=True)
class ZooCase:
    """One way of driving one model.

    Args:
        make: builds a ``zoo.Case`` from a device and a dtype.
        max_graphs: as for ``attach``; enough for the signatures that the driver makes.
        replays: how many calls must be replayed at least on the tape.
        reasons: why the other calls run eager, by the name of the reason; empty where none does.
        detail: what the detail of that reason names.
        needs: distribution that the case needs beside the ``models`` extra.
        devices: device types on which it means something.
    """

    make: Callable[..., zoo.Case]
    max_graphs: int = 4
    replays: int = 2
    reasons: frozenset[str] = frozenset()
    detail: str = ""
    needs: str | None = None
    devices: tuple[str, ...] = ("cpu", "cuda")

    def build(self, device: Any = "cpu", dtype: torch.dtype = torch.float32) -> zoo.Case:
        """The same model and the same calls, bit for bit, each time."""
        return self.make(device=device, dtype=dtype)


def _plain(make: Callable[..., zoo.Case], steps: int = 5, **expected: Any) -> ZooCase:
    return ZooCase(partial(make, steps=steps), **expected)


CASES: dict[str, ZooCase] = {
    "qwen_image": _plain(zoo.qwen_image),
    "flux": _plain(zoo.flux),
    "sd3": _plain(zoo.sd3),
    "wan": _plain(zoo.wan, steps=3, replays=3),
    "ltx_video": _plain(zoo.ltx_video),
    "cogvideox": _plain(zoo.cogvideox),
    "pixart": _plain(zoo.pixart),
    "sana": _plain(zoo.sana),
    "z_image": _plain(zoo.z_image),
    "sdxl_unet": _plain(zoo.sdxl_unet),
    "controlnet": _plain(zoo.controlnet),
    "sdxl_unet_with_controlnet": _plain(zoo.sdxl_unet_with_controlnet),
    "alpamayo_expert": _plain(zoo.alpamayo_expert, steps=6),
    "alpamayo_expert_cfg": _plain(zoo.alpamayo_expert_cfg, replays=4),
    "qwen3_expert": _plain(zoo.qwen3_expert, steps=6),
    "llama_expert": _plain(zoo.llama_expert, steps=6),
    "qwen3_vl_text_prefill": _plain(
        zoo.qwen3_vl_text_prefill,
        replays=0,
        reasons=frozenset({"read_back"}),
        detail="masking_utils.py",  # it asks whether the padding mask is all true
    ),
    "dynamic_decode": _plain(zoo.dynamic_decode, max_graphs=2, replays=0, reasons=frozenset({"limit", "read_back"})),
    "static_decode": _plain(zoo.static_decode, steps=6),
    "pi0_action_expert": _plain(zoo.pi0_action_expert),
    "timm_vit": _plain(zoo.timm_vit, needs="timm"),
    # Variants: the same models, driven in the other ways that their pipelines know.
    "qwen_image-two_lengths": ZooCase(partial(zoo.qwen_image, steps=5, text_tokens=(7, 5)), replays=4),
    "qwen_image-padded": ZooCase(partial(zoo.qwen_image, steps=5, padded=True)),
    "sdxl_unet-int_timestep": ZooCase(
        partial(zoo.sdxl_unet, steps=8, timestep_type="int"),
        max_graphs=2,
        replays=0,
        reasons=frozenset({"scalar_churn", "limit"}),
        detail="args[1]",
    ),
    "sdxl_unet-cpu_timestep": ZooCase(
        partial(zoo.sdxl_unet, steps=6, timestep_type="cpu0d"),
        replays=0,
        reasons=frozenset({"scalar_churn", "limit", "host_tensor"}),
        devices=("cuda",),
    ),
    "controlnet-scale_changes": ZooCase(partial(zoo.controlnet, steps=6, scales=(0.7, 0.7, 0.0)), replays=2),
    "flux-return_dict": ZooCase(partial(zoo.flux, steps=5, return_dict=True)),
    "wan-token_timesteps": ZooCase(partial(zoo.wan, steps=3, expand_timesteps=True), replays=3),
    "alpamayo_expert_cfg-two_lengths": ZooCase(
        partial(zoo.alpamayo_expert, steps=5, prompt_tokens=(11, 7)), max_graphs=8, replays=4
    ),
    "pi0-one_cache_cropped": ZooCase(partial(zoo.pi0_action_expert, steps=6, fresh_cache=False)),
}
