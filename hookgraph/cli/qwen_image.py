"""A small Qwen-Image denoising loop on diffusers' own transformer and scheduler, with random weights."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, QwenImageTransformer2DModel

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

# diffusers annotates these in part only, which strict typing refuses.
_Transformer: Any = QwenImageTransformer2DModel
_Scheduler: Any = FlowMatchEulerDiscreteScheduler

_GRID = (16, 16)  # image tokens: a picture of 256 x 256, through a VAE of 8 and patches of 2
_PROMPT_TOKENS = (21, 9)  # guided and unguided; they differ, so each step makes calls of two signatures
_TEXT_DIM = 128
_GUIDANCE_SCALE = 4.0  # the pipeline's default ``true_cfg_scale``


@dataclass(frozen=True, slots=True)
class Job:
    """A transformer and everything that its denoising loop starts from.

    Args:
        latents: the noise to start from, ``(1, image tokens, channels)``.
        prompts: embeddings of the prompt and of the negative prompt, each ``(1, text tokens, dim)``.
    """

    transformer: torch.nn.Module
    steps: int
    latents: Tensor
    prompts: tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Run:
    """What one denoising loop gave.

    Args:
        outputs: every output of the transformer, two a step.
        step_ns: time of each step, device work included.
    """

    outputs: list[Tensor]
    latents: Tensor
    step_ns: list[int]


def build(device: torch.device, steps: int, seed: int = 0) -> Job:
    """Build the transformer and its inputs from a seed; nothing is downloaded.

    The weights are float32 on a CPU and bfloat16 elsewhere, as the pipeline is used there.
    """
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        transformer = _Transformer(
            patch_size=2,
            in_channels=64,
            out_channels=16,
            num_layers=4,
            attention_head_dim=64,
            num_attention_heads=2,
            joint_attention_dim=_TEXT_DIM,
            axes_dims_rope=(8, 28, 28),
        )
        latents = torch.randn(1, _GRID[0] * _GRID[1], 64)
        prompt, negative = (torch.randn(1, tokens, _TEXT_DIM) for tokens in _PROMPT_TOKENS)
    for parameter in transformer.parameters():
        parameter.data = parameter.data.to(dtype)  # diffusers' own to(dtype) warns
    return Job(
        transformer=transformer.to(device).eval().requires_grad_(False),
        steps=steps,
        latents=latents.to(device, dtype),
        prompts=(prompt.to(device, dtype), negative.to(device, dtype)),
    )


@torch.no_grad()
def denoise(job: Job, after_step: Callable[[int], None]) -> Run:
    """Run the loop of ``QwenImagePipeline.__call__``: two calls a step, true guidance, one Euler step.

    Args:
        after_step: called with the index of each step that is done, outside the measured time.
    """
    scheduler = _scheduler(job)
    latents, outputs, step_ns = job.latents, [], []
    for step, timestep in enumerate(scheduler.timesteps):
        start = _now(latents.device)
        guided, unguided = (_predict(job, latents, timestep, prompt) for prompt in job.prompts)
        latents = scheduler.step(_combine(guided, unguided), timestep, latents, return_dict=False)[0]
        step_ns.append(_now(latents.device) - start)
        outputs += [guided, unguided]
        after_step(step)
    return Run(outputs, latents, step_ns)


def arguments(latents: Tensor, timestep: Tensor, prompt: Tensor) -> dict[str, Any]:
    """Argument for argument what the pipeline passes; it drops a prompt mask that is all true."""
    return dict(
        hidden_states=latents,
        timestep=timestep.expand(latents.shape[0]).to(latents.dtype) / 1000,
        guidance=None,
        encoder_hidden_states_mask=None,
        encoder_hidden_states=prompt,
        img_shapes=[[(1, *_GRID)]],
        attention_kwargs={},
        return_dict=False,
    )


def _predict(job: Job, latents: Tensor, timestep: Tensor, prompt: Tensor) -> Tensor:
    outputs: tuple[Tensor] = job.transformer(**arguments(latents, timestep, prompt))
    return outputs[0]


def _combine(guided: Tensor, unguided: Tensor) -> Tensor:
    combined = unguided + _GUIDANCE_SCALE * (guided - unguided)
    scale: Tensor = torch.norm(guided, dim=-1, keepdim=True) / torch.norm(combined, dim=-1, keepdim=True)
    return combined * scale


def _scheduler(job: Job) -> Any:
    scheduler = _Scheduler()
    scheduler.set_timesteps(job.steps, device=job.latents.device)
    scheduler.set_begin_index(0)  # otherwise each step would read the device to find its own index
    return scheduler


def _now(device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter_ns()
