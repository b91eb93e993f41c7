"""Tiny random-weight copies of real models, with the calls their drivers make.

Every function builds one model from a small config (no download) and the
arguments that the model's own pipeline, policy or ``generate`` loop passes for
``steps`` consecutive calls.  It returns a ``Case``::

    case = flux(device="cuda", dtype=torch.bfloat16)
    for args, kwargs in case.calls:
        out = case.run(*args, **kwargs)

``case.module`` is the module to instrument.  ``case.run`` makes one call the way
the driver makes it (through ``module(...)``, or ``module.forward(...)`` for the
two policies that bypass hooks) and then does what the driver does between calls
(``cache.crop`` and the like).

The argument *containers* matter as much as the tensors: which values are
expanded views, which lists are reused or rebuilt, which scalars are Python
numbers.  They were compared with what the real pipelines pass (diffusers 0.42).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass
class Case:
    """A module, the calls to make on it, and what happens after each call."""

    module: nn.Module
    calls: list[Call]
    entry: str = "__call__"  # or "forward": the driver bypasses module hooks
    after: Callable[[], None] = field(default=lambda: None)

    def __iter__(self) -> Iterator[Any]:
        """Unpack as ``module, calls``."""
        yield self.module
        yield self.calls

    def run(self, *args: Any, **kwargs: Any) -> Any:
        target = self.module if self.entry == "__call__" else self.module.forward
        out = target(*args, **kwargs)
        self.after()
        return out


CASES: dict[str, Callable[..., Case]] = {}


def case(function: Callable[..., Case]) -> Callable[..., Case]:
    CASES[function.__name__] = function
    return function


@contextmanager
def _seeded(seed: int = 0) -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


def _build(make: Callable[[], nn.Module], device: Any, dtype: torch.dtype) -> nn.Module:
    """Build on the CPU in float32, cast as ``from_pretrained(dtype=...)`` does, move."""
    with _seeded():
        module = make()
        keep = set(getattr(module, "_keep_in_fp32_modules", None) or ())
        for name, parameter in module.named_parameters():
            # Zero-initialised projections would hide mistakes: outputs would not
            # depend on the inputs.
            if parameter.is_floating_point() and not parameter.count_nonzero():
                nn.init.normal_(parameter, std=0.02)
            if parameter.is_floating_point() and not keep.intersection(name.split(".")):
                parameter.data = parameter.data.to(dtype)
    return module.to(device).eval().requires_grad_(False)


class _Random:
    """Random tensors in one device and dtype."""

    def __init__(self, device: Any, dtype: torch.dtype, seed: int = 1) -> None:
        self.device, self.dtype = torch.device(device), dtype
        self.generator = torch.Generator("cpu").manual_seed(seed)

    def __call__(self, *shape: int) -> torch.Tensor:
        values = torch.randn(shape, generator=self.generator)
        return values.to(self.device, self.dtype)


def _flow_timesteps(steps: int, device: Any) -> torch.Tensor:
    """Float timesteps in (0, 1000], like ``FlowMatchEulerDiscreteScheduler``."""
    return torch.linspace(1000.0, 1000.0 / steps, steps, device=device)


def _ddim_timesteps(steps: int, device: Any) -> torch.Tensor:
    """Integer timesteps, like ``DDIMScheduler`` and ``DPMSolverMultistepScheduler``."""
    return torch.linspace(981, 1, steps).round().long().to(device)


# --------------------------------------------------------------------------
# diffusers transformers
# --------------------------------------------------------------------------


@case
def qwen_image(
    device: Any = "cpu",
    dtype: torch.dtype = torch.float32,
    steps: int = 3,
    batch: int = 1,
    text_tokens: tuple[int, ...] = (7,),
    padded: bool = False,
    grid: tuple[int, int] = (4, 4),
    attention_kwargs: dict[str, Any] | None = None,
) -> Case:
    """``QwenImagePipeline``: nested Python shapes, true CFG as two calls per step.

    ``text_tokens`` lists one prompt length per CFG branch: ``(7, 5)`` gives a
    conditional and an unconditional call per step with different text lengths.
    ``padded`` gives a boolean text mask where the pipeline would give ``None``
    (it drops masks that are all true).
    """
    from diffusers import QwenImageTransformer2DModel

    module = _build(
        lambda: QwenImageTransformer2DModel(
            patch_size=2,
            in_channels=16,
            out_channels=4,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=16,
            axes_dims_rope=(8, 4, 4),
        ),
        device,
        dtype,
    )
    rand = _Random(device, dtype)
    height, width = grid
    img_shapes = [[(1, height, width)]] * batch
    shared_kwargs = {} if attention_kwargs is None else attention_kwargs
    branches = []
    for length in text_tokens:
        mask = None
        if padded:
            mask = torch.ones(batch, length, dtype=torch.bool, device=device)
            mask[:, -2:] = False
        branches.append((rand(batch, length, 16), mask))
    calls: list[Call] = []
    for t in _flow_timesteps(steps, device):
        latents = rand(batch, height * width, 16)
        timestep = t.expand(batch).to(latents.dtype)
        for embeds, mask in branches:
            kwargs = dict(
                hidden_states=latents,
                timestep=timestep / 1000,
                guidance=None,
                encoder_hidden_states_mask=mask,
                encoder_hidden_states=embeds,
                img_shapes=img_shapes,
                attention_kwargs=shared_kwargs,
                return_dict=False,
            )
            calls.append(((), kwargs))
    return Case(module, calls)


@case
def flux(
    device: Any = "cpu",
    dtype: torch.dtype = torch.float32,
    steps: int = 3,
    batch: int = 1,
    text_tokens: int = 6,
    grid: tuple[int, int] = (4, 4),
    return_dict: bool = False,
) -> Case:
    """``FluxPipeline``: position ids as tensors, distilled guidance as a tensor."""
    from diffusers import FluxTransformer2DModel

    module = _build(
        lambda: FluxTransformer2DModel(
            in_channels=16,
            num_layers=1,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            pooled_projection_dim=32,
            guidance_embeds=True,
            axes_dims_rope=(4, 4, 8),
        ),
        device,
        dtype,
    )
    rand = _Random(device, dtype)
    height, width = grid
    text_ids = torch.zeros(text_tokens, 3).to(device=device, dtype=dtype)
    image_ids = torch.zeros(height, width, 3)
    image_ids[..., 1] += torch.arange(height)[:, None]
    image_ids[..., 2] += torch.arange(width)[None, :]
    image_ids = image_ids.reshape(-1, 3).to(device=device, dtype=dtype)
    guidance = torch.full([1], 3.5, device=device, dtype=torch.float32).expand(batch)
    embeds, pooled = rand(batch, text_tokens, 32), rand(batch, 32)
    joint_attention_kwargs: dict[str, Any] = {}
    calls: list[Call] = []
    for t in _flow_timesteps(steps, device):
        latents = rand(batch, height * width, 16)
        timestep = t.expand(batch).to(latents.dtype)
        kwargs = dict(
            hidden_states=latents,
            timestep=timestep / 1000,
            guidance=guidance,
            pooled_projections=pooled,
            encoder_hidden_states=embeds,
            txt_ids=text_ids,
            img_ids=image_ids,
            joint_attention_kwargs=joint_attention_kwargs,
            return_dict=return_dict,
        )
        calls.append(((), kwargs))
    return Case(module, calls)


@case
def sd3(device: Any = "cpu", dtype: torch.dtype = torch.float32, steps: int = 3, batch: int = 1) -> Case:
    """``StableDiffusion3Pipeline``: CFG as one doubled batch, stride-0 timestep."""
    from diffusers import SD3Transformer2DModel

    module = _build(
        lambda: SD3Transformer2DModel(
            sample_size=8,
            patch_size=2,
            in_channels=4,
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=4,
            caption_projection_dim=32,
            joint_attention_dim=32,
            pooled_projection_dim=64,
            out_channels=4,
            pos_embed_max_size=16,
            dual_attention_layers=(0,),
            qk_norm="rms_norm",
        ),
        device,
        dtype,
    )
    rand = _Random(device, dtype)
    embeds, pooled = rand(2 * batch, 9, 32), rand(2 * batch, 64)
    calls: list[Call] = []
    for t in _flow_timesteps(steps, device):
        latents = torch.cat([rand(batch, 4, 8, 8)] * 2)
        kwargs = dict(
            hidden_states=latents,
            timestep=t.expand(latents.shape[0]),
            encoder_hidden_states=embeds,
            pooled_projections=pooled,
            joint_attention_kwargs=None,
            return_dict=False,
        )
        calls.append(((), kwargs))
    return Case(module, calls)


@case
def wan(
    device: Any = "cpu",
    dtype: torch.dtype = torch.float32,
    steps: int = 3,
    batch: int = 1,
    expand_timesteps: bool = False,
) -> Case:
    """``WanPipeline``: two calls per step; ``expand_timesteps`` gives Wan 2.2's (B, S)."""
    from diffusers import WanTransformer3DModel

    module = _build(
        lambda: WanTransformer3DModel(
            patch_size=(1, 2, 2),
            num_attention_heads=2,
            attention_head_dim=12,
            in_channels=4,
            out_channels=4,
            text_dim=16,
            freq_dim=32,
            ffn_dim=32,
            num_layers=2,
            rope_max_seq_len=32,
        ),
        device,
        dtype,
    )
    rand = _Random(device, dtype)
    branches = [rand(batch, 8, 16), rand(batch, 8, 16)]
    mask = torch.ones(1, 1, 3, 4, 4, dtype=torch.float32, device=device)
    calls: list[Call] = []
    for t in _flow_timesteps(steps, device):
        latents = rand(batch, 4, 3, 4, 4)
        if expand_timesteps:
            timestep = (mask[0][0][:, ::2, ::2] * t).flatten().unsqueeze(0).expand(batch, -1)
        else:
            timestep = t.expand(batch)
        for embeds in branches:
            kwargs = dict(
                hidden_states=latents,
                timestep=timestep,
                encoder_hidden_states=embeds,
                attention_kwargs=None,
                return_dict=False,
            )
            calls.append(((), kwargs))
    return Case(module, calls)


@case
def ltx_video(device: Any = "cpu", dtype: torch.dtype = torch.float32, steps: int = 3, batch: int = 1) -> Case:
    """``LTXPipeline``: frame counts as ints, RoPE scale as a tuple of numbers."""
    from diffusers import LTXVideoTransformer3DModel

    module = _build(
        lambda: LTXVideoTransformer3DModel(
            in_channels=4,
            out_channels=4,
            num_attention_heads=2,
            attention_head_dim=8,
            cross_attention_dim=16,
            num_layers=2,
            caption_channels=16,
        ),
        device,
        dtype,
    )
    rand = _Random(device, dtype)
    frames, height, width = 2, 4, 4
    embeds = rand(2 * batch, 6, 16)
    mask = torch.ones(2 * batch, 6, dtype=torch.bool, device=device)
    mask[0, 4:] = False
    calls: list[Call] = []
    for t in _flow_timesteps(steps, device):
        latents = torch.cat([rand(batch, frames * height * width, 4)] * 2)
        kwargs = dict(
            hidden_states=latents,
            encoder_hidden_states=embeds,
            timestep=t.expand(latents.shape[0]),
            encoder_attention_mask=mask,
            num_frames=frames,
            height=height,
            width=width,
            rope_interpolation_scale=(8 / 25, 32, 32),
            attention_kwargs=None,
            return_dict=False,
        )
        calls.append(((), kwargs))
    return Case(module, calls)


@case
def cogvideox(device: Any = "cpu", dtype: torch.dtype = torch.float32, steps: int = 3, batch: int = 1) -> Case:
    """``CogVideoXPipeline``: the RoPE tables arrive as an argument, a tuple of two."""
    from diffusers import CogVideoXTransformer3DModel

    module = _build(
        lambda: CogVideoXTransformer3DModel(
            num_attention_heads=4,
            attention_head_dim=16,
            in_channels=4,
            out_channels=4,
            time_embed_dim=8,
            text_embed_dim=16,
            num_layers=2,
            sample_width=8,
            sample_height=8,
            sample_frames=9,
            patch_size=2,
            temporal_compression_ratio=4,
            max_text_seq_length=8,
            use_rotary_positional_embeddings=True,
        ),
        device,
        dtype,
    )
    rand = _Random(device, dtype)
    tokens = 3 * 4 * 4
    angles = torch.outer(torch.arange(tokens).float(), torch.linspace(1.0, 0.01, 16)).to(device)
    rotary = (angles.cos(), angles.sin())
    embeds = rand(2 * batch, 8, 16)
    calls: list[Call] = []
    for t in _ddim_timesteps(steps, device):
        latents = torch.cat([rand(batch, 3, 4, 8, 8)] * 2)
        kwargs = dict(
            hidden_states=latents,
            encoder_hidden_states=embeds,
            timestep=t.expand(latents.shape[0]),
            image_rotary_emb=rotary,
            attention_kwargs=None,
            return_dict=False,
        )
        calls.append(((), kwargs))
    return Case(module, calls)


@case
def pixart(device: Any = "cpu", dtype: torch.dtype = torch.float32, steps: int = 3, batch: int = 1) -> Case:
    """``PixArtSigmaPipeline``: latents by position, a dict of ``None`` values."""
    from diffusers import PixArtTransformer2DModel

    module = _build(
        lambda: PixArtTransformer2DModel(
            sample_size=8,
            num_layers=2,
            patch_size=2,
            attention_head_dim=8,
            num_attention_heads=3,
            caption_channels=32,
            in_channels=4,
            cross_attention_dim=24,
            out_channels=8,
        ),
        device,
        dtype,
    )
    rand = _Random(device, dtype)
    embeds = rand(2 * batch, 7, 32)
    mask = torch.ones(2 * batch, 7, dtype=torch.int64, device=device)
    mask[0, 5:] = 0
    added: dict[str, Any] = {"resolution": None, "aspect_ratio": None}
    calls: list[Call] = []
    for t in _ddim_timesteps(steps, device):
        latents = torch.cat([rand(batch, 4, 8, 8)] * 2)
        kwargs = dict(
            encoder_hidden_states=embeds,
            encoder_attention_mask=mask,
            timestep=t[None].expand(latents.shape[0]),
            added_cond_kwargs=added,
            return_dict=False,
        )
        calls.append(((latents,), kwargs))
    return Case(module, calls)


@case
def sana(device: Any = "cpu", dtype: torch.dtype = torch.float32, steps: int = 3, batch: int = 1) -> Case:
    """``SanaPipeline``: linear attention, latents by position."""
    from diffusers import SanaTransformer2DModel

    module = _build(
        lambda: SanaTransformer2DModel(
            in_channels=4,
            out_channels=4,
            num_layers=2,
            attention_head_dim=4,
            num_attention_heads=2,
            num_cross_attention_heads=2,
            cross_attention_head_dim=4,
            cross_attention_dim=8,
            caption_channels=8,
            sample_size=8,
            patch_size=1,
        ),
        device,
        dtype,
    )
    rand = _Random(device, dtype)
    embeds = rand(2 * batch, 7, 8)
    mask = torch.ones(2 * batch, 7, dtype=torch.int64, device=device)
    mask[0, 5:] = 0
    calls: list[Call] = []
    for t in _ddim_timesteps(steps, device):
        latents = torch.cat([rand(batch, 4, 8, 8)] * 2)
        kwargs = dict(
            encoder_hidden_states=embeds,
            encoder_attention_mask=mask,
            timestep=t.expand(latents.shape[0]) * 1.0,
            return_dict=False,
            attention_kwargs=None,
        )
        calls.append(((latents,), kwargs))
    return Case(module, calls)


@case
def z_image(
    device: Any = "cpu",
    dtype: torch.dtype = torch.float32,
    steps: int = 3,
    batch: int = 1,
    caption_tokens: tuple[int, int] = (9, 4),
) -> Case:
    """``ZImagePipeline``: lists of per-sample tensors in, a list in a tuple out."""
    from diffusers import ZImageTransformer2DModel

    module = _build(
        lambda: ZImageTransformer2DModel(
            all_patch_size=(2,),
            all_f_patch_size=(1,),
            in_channels=4,
            dim=32,
            n_layers=2,
            n_refiner_layers=1,
            n_heads=2,
            n_kv_heads=2,
            cap_feat_dim=16,
            axes_dims=[8, 4, 4],
            axes_lens=[128, 32, 32],
        ),
        device,
        dtype,
    )
    rand = _Random(device, dtype)
    captions = [rand(length, 16) for length in caption_tokens for _ in range(batch)]
    calls: list[Call] = []
    for t in _flow_timesteps(steps, device):
        timestep = (1000 - t.expand(batch)) / 1000
        latents = rand(batch, 4, 8, 8).repeat(2, 1, 1, 1).unsqueeze(2)
        args = (list(latents.unbind(dim=0)), timestep.repeat(2), list(captions))
        calls.append((args, dict(joint_attention_kwargs=None, return_dict=False)))
    return Case(module, calls)


# --------------------------------------------------------------------------
# diffusers U-Nets and control networks
# --------------------------------------------------------------------------

_UNET = dict(
    block_out_channels=(16, 32),
    layers_per_block=1,
    in_channels=4,
    down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
    attention_head_dim=(2, 4),
    use_linear_projection=True,
    addition_embed_type="text_time",
    addition_time_embed_dim=8,
    transformer_layers_per_block=(1, 1),
    projection_class_embeddings_input_dim=80,
    cross_attention_dim=32,
    norm_num_groups=4,
)


def _sdxl_unet(device: Any, dtype: torch.dtype) -> nn.Module:
    from diffusers import UNet2DConditionModel

    def make() -> nn.Module:
        return UNet2DConditionModel(
            sample_size=16,
            out_channels=4,
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            **_UNET,
        )

    return _build(make, device, dtype)


def _controlnet(device: Any, dtype: torch.dtype) -> nn.Module:
    from diffusers import ControlNetModel

    def make() -> nn.Module:
        return ControlNetModel(conditioning_embedding_out_channels=(16, 32), **_UNET)

    return _build(make, device, dtype)


@case
def sdxl_unet(
    device: Any = "cpu",
    dtype: torch.dtype = torch.float32,
    steps: int = 3,
    batch: int = 1,
    timestep_type: str = "tensor0d",
) -> Case:
    """``StableDiffusionXLPipeline``: ``added_cond_kwargs`` and a 0-dim timestep.

    ``timestep_type`` selects how the second positional argument arrives:
    ``"tensor0d"`` on the model's device, ``"cpu0d"`` as schedulers that keep
    their timesteps on the CPU give it, or ``"int"`` as older drivers pass it.
    """
    module = _sdxl_unet(device, dtype)
    rand = _Random(device, dtype)
    embeds, pooled = rand(2 * batch, 7, 32), rand(2 * batch, 32)
    time_ids = torch.tensor([[16, 16, 0, 0, 16, 16]] * 2 * batch, dtype=dtype, device=device)
    calls: list[Call] = []
    for t in _ddim_timesteps(steps, "cpu" if timestep_type == "cpu0d" else device):
        latents = torch.cat([rand(batch, 4, 16, 16)] * 2)
        kwargs = dict(
            encoder_hidden_states=embeds,
            timestep_cond=None,
            cross_attention_kwargs=None,
            added_cond_kwargs={"text_embeds": pooled, "time_ids": time_ids},
            return_dict=False,
        )
        timestep = int(t) if timestep_type == "int" else t
        calls.append(((latents, timestep), kwargs))
    return Case(module, calls)


@case
def controlnet(
    device: Any = "cpu",
    dtype: torch.dtype = torch.float32,
    steps: int = 3,
    batch: int = 1,
    scales: tuple[float, ...] | None = None,
) -> Case:
    """``StableDiffusionXLControlNetPipeline``: a Python float that may change per step."""
    module = _controlnet(device, dtype)
    rand = _Random(device, dtype)
    embeds, pooled = rand(2 * batch, 7, 32), rand(2 * batch, 32)
    time_ids = torch.tensor([[16, 16, 0, 0, 16, 16]] * 2 * batch, dtype=dtype, device=device)
    image = torch.cat([rand(batch, 3, 32, 32)] * 2)
    calls: list[Call] = []
    for i, t in enumerate(_ddim_timesteps(steps, device)):
        latents = torch.cat([rand(batch, 4, 16, 16)] * 2)
        kwargs = dict(
            encoder_hidden_states=embeds,
            controlnet_cond=image,
            conditioning_scale=scales[i % len(scales)] if scales else 0.7,
            guess_mode=False,
            added_cond_kwargs={"text_embeds": pooled, "time_ids": time_ids},
            return_dict=False,
        )
        calls.append(((latents, t), kwargs))
    return Case(module, calls)


@case
def sdxl_unet_with_controlnet(
    device: Any = "cpu", dtype: torch.dtype = torch.float32, steps: int = 3, batch: int = 1
) -> Case:
    """The U-Net call of the ControlNet pipeline: a list of residual tensors."""
    control = controlnet(device, dtype, steps, batch)
    base = sdxl_unet(device, dtype, steps, batch)
    calls: list[Call] = []
    with torch.no_grad():
        for (args, kwargs), (control_args, control_kwargs) in zip(base.calls, control.calls, strict=True):
            down, mid = control.module(*control_args, **control_kwargs)
            extra = dict(down_block_additional_residuals=down, mid_block_additional_residual=mid)
            calls.append((args, kwargs | extra))
    return Case(base.module, calls)


# --------------------------------------------------------------------------
# transformers: decoders with caches
# --------------------------------------------------------------------------


def _crop(cache: Any, keep: int) -> None:
    """Cut a ``DynamicCache`` back to ``keep`` tokens on every transformers version.

    Up to 5.x the argument was a length to keep; later versions accept only a
    negative number of tokens to remove.
    """
    excess = int(cache.get_seq_length()) - keep
    if excess > 0:
        cache.crop(-excess)


def _decoder_config(kind: str) -> Any:
    import transformers as tf

    common = dict(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    if kind == "qwen3":
        return tf.Qwen3Config(head_dim=8, **common)
    if kind == "llama":
        return tf.LlamaConfig(**common)
    if kind == "mistral":
        return tf.MistralConfig(head_dim=8, sliding_window=8, **common)
    if kind == "gemma":
        return tf.GemmaConfig(head_dim=8, **common)
    if kind == "qwen3_vl":
        rope = dict(rope_type="default", mrope_section=[2, 1, 1], rope_theta=10000.0)
        key = "rope_parameters" if int(tf.__version__.split(".")[0]) >= 5 else "rope_scaling"
        return tf.Qwen3VLTextConfig(head_dim=8, **common, **{key: rope})
    raise ValueError(kind)


def _decoder(kind: str, device: Any, dtype: torch.dtype) -> nn.Module:
    import transformers as tf

    return _build(lambda: tf.AutoModel.from_config(_decoder_config(kind)), device, dtype)


def _prefilled(module: nn.Module, config: Any, batch: int, tokens: int, rand: _Random) -> Any:
    """A ``DynamicCache`` holding a random prompt.

    The cache really comes from another model (the VLM), which is why its tensors
    are built here rather than by running ``module``.
    """
    from transformers import DynamicCache

    cache = DynamicCache()
    heads, dim = config.num_key_value_heads, config.head_dim
    for layer in range(config.num_hidden_layers):
        cache.update(rand(batch, heads, tokens, dim), rand(batch, heads, tokens, dim), layer)
    return cache


def _additive_mask(
    batch: int, queries: int, keys: int, device: Any, dtype: torch.dtype, hole: tuple[int, int] | None
) -> torch.Tensor:
    mask = torch.zeros(batch, 1, queries, keys, dtype=dtype, device=device)
    if hole is not None:
        mask[:, :, :, hole[0] : hole[1]] = torch.finfo(dtype).min
    return mask


@case
def alpamayo_expert(
    device: Any = "cpu",
    dtype: torch.dtype = torch.float32,
    steps: int = 3,
    batch: int = 2,
    prompt_tokens: tuple[int, ...] = (11,),
    action_tokens: int = 5,
    mask_dtype: torch.dtype = torch.float32,
    kind: str = "qwen3_vl",
) -> Case:
    """NVlabs/alpamayo: a decoder denoises action tokens against a prompt cache.

    The cache grows during each call and is cropped after it.  Give two
    ``prompt_tokens`` for the classifier-free-guidance rollout, which alternates
    between a guided and an unguided cache on every step.  ``is_causal=False`` is
    a keyword that ``forward`` swallows through ``**kwargs``.  The real mask is
    float32 even where the weights are bfloat16 (it runs under autocast).
    """
    module = _decoder(kind, device, dtype)
    del module.embed_tokens  # the project deletes it too
    config = module.config
    rand = _Random(device, dtype)
    branches = []
    for tokens in prompt_tokens:
        cache = _prefilled(module, config, batch, tokens, rand)
        positions = torch.arange(action_tokens, device=device).expand(3, batch, -1).clone() + tokens
        if kind != "qwen3_vl":
            positions = positions[0]
        mask = _additive_mask(batch, action_tokens, tokens + action_tokens, device, mask_dtype, (tokens - 2, tokens))
        branches.append((cache, tokens, positions, mask))
    calls: list[Call] = []
    for _ in range(steps):
        embeds = rand(batch, action_tokens, config.hidden_size)
        for cache, _tokens, positions, mask in branches:
            kwargs = dict(
                inputs_embeds=embeds,
                position_ids=positions,
                past_key_values=cache,
                attention_mask=mask,
                use_cache=True,
                is_causal=False,
            )
            calls.append(((), kwargs))

    def after() -> None:
        for cache, tokens, _positions, _mask in branches:
            _crop(cache, tokens)

    return Case(module, calls, after=after)


@case
def alpamayo_expert_cfg(device: Any = "cpu", dtype: torch.dtype = torch.float32, steps: int = 3) -> Case:
    """The guided/unguided rollout with equal prompt lengths: one signature, two caches."""
    return alpamayo_expert(device, dtype, steps, prompt_tokens=(11, 11))


@case
def qwen3_expert(device: Any = "cpu", dtype: torch.dtype = torch.float32, steps: int = 3) -> Case:
    return alpamayo_expert(device, dtype, steps, kind="qwen3")


@case
def llama_expert(device: Any = "cpu", dtype: torch.dtype = torch.float32, steps: int = 3) -> Case:
    """As above; without ``head_dim`` in the config the model computes it."""
    return alpamayo_expert(device, dtype, steps, kind="llama")


@case
def qwen3_vl_text_prefill(
    device: Any = "cpu", dtype: torch.dtype = torch.float32, steps: int = 2, batch: int = 1, tokens: int = 12
) -> Case:
    """The text half of Qwen3-VL on a prompt with image tokens (deepstack, data-dependent)."""
    module = _decoder("qwen3_vl", device, dtype)
    rand = _Random(device, dtype)
    visual = torch.zeros(batch, tokens, dtype=torch.bool, device=device)
    visual[:, 2:6] = True
    count = 4 * batch
    calls: list[Call] = []
    for _ in range(steps):
        kwargs = dict(
            input_ids=None,
            position_ids=torch.arange(tokens, device=device).expand(4, batch, -1),
            attention_mask=torch.ones(batch, tokens, dtype=torch.int64, device=device),
            past_key_values=None,
            inputs_embeds=rand(batch, tokens, 32),
            visual_pos_masks=visual,
            deepstack_visual_embeds=[rand(count, 32), rand(count, 32)],
            use_cache=True,
        )
        calls.append(((), kwargs))
    return Case(module, calls)


@case
def dynamic_decode(
    device: Any = "cpu", dtype: torch.dtype = torch.float32, steps: int = 4, kind: str = "llama"
) -> Case:
    """``generate`` with a ``DynamicCache``: every call has a new shape."""
    module = _decoder(kind, device, dtype)
    rand = _Random(device, dtype)
    config = copy.copy(module.config)
    config.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cache = _prefilled(module, config, 1, 6, rand)
    calls: list[Call] = []
    for step in range(steps):
        kwargs = dict(
            input_ids=torch.tensor([[step + 3]], device=device),
            attention_mask=torch.ones(1, 7 + step, dtype=torch.int64, device=device),
            position_ids=torch.tensor([[6 + step]], device=device),
            past_key_values=cache,
            use_cache=True,
        )
        calls.append(((), kwargs))
    return Case(module, calls)


@case
def static_decode(device: Any = "cpu", dtype: torch.dtype = torch.float32, steps: int = 4, kind: str = "llama") -> Case:
    """Token-by-token decode into a ``StaticCache`` that ``forward`` writes in place."""
    import inspect

    from transformers import StaticCache

    module = _decoder(kind, device, dtype)
    length, prompt = 24, 5
    cache = StaticCache(config=module.config, max_cache_len=length)
    takes_position = "cache_position" in inspect.signature(type(module).forward).parameters
    ids = torch.arange(prompt, device=device)[None]
    with torch.no_grad():
        extra = {"cache_position": torch.arange(prompt, device=device)} if takes_position else {}
        module(input_ids=ids, past_key_values=cache, use_cache=True, **extra)
    calls: list[Call] = []
    for step in range(steps):
        position = torch.tensor([prompt + step], device=device)
        kwargs: dict[str, Any] = dict(
            input_ids=torch.tensor([[step + 3]], device=device),
            position_ids=position[None],
            past_key_values=cache,
            use_cache=True,
        )
        if takes_position:
            kwargs["cache_position"] = position
        calls.append(((), kwargs))
    return Case(module, calls)


# --------------------------------------------------------------------------
# robot policies
# --------------------------------------------------------------------------


@case
def pi0_action_expert(
    device: Any = "cpu",
    dtype: torch.dtype = torch.float32,
    steps: int = 3,
    batch: int = 1,
    fresh_cache: bool = True,
) -> Case:
    """openpi and lerobot pi0: ``gemma_expert.model.forward(...)``, so no hook runs.

    lerobot clones the prompt cache for every step (``fresh_cache``): the cache is
    a new object with new tensors each time and is dropped after the call.
    """
    module = _decoder("gemma", device, dtype)
    config = module.config
    module.embed_tokens = None
    rand = _Random(device, dtype)
    prefix, suffix = 9, 4
    cache = _prefilled(module, config, batch, prefix, rand)
    allowed = torch.ones(batch, 1, suffix, prefix + suffix, dtype=torch.bool, device=device)
    mask = torch.where(allowed, 0.0, -2.3819763e38)
    calls: list[Call] = []
    for _ in range(steps):
        kwargs = dict(
            inputs_embeds=rand(batch, suffix, config.hidden_size),
            attention_mask=mask.clone(),
            position_ids=prefix + torch.arange(suffix, device=device).expand(batch, -1),
            past_key_values=copy.deepcopy(cache) if fresh_cache else cache,
            use_cache=False,
        )
        calls.append(((), kwargs))
    after = (lambda: None) if fresh_cache else (lambda: _crop(cache, prefix))
    return Case(module, calls, entry="forward", after=after)


# --------------------------------------------------------------------------
# plain vision models
# --------------------------------------------------------------------------


@case
def timm_vit(device: Any = "cpu", dtype: torch.dtype = torch.float32, steps: int = 3, batch: int = 2) -> Case:
    """A plain ViT: one positional tensor in, one tensor out.  Needs timm and torchvision."""
    import timm

    def make() -> nn.Module:
        return timm.create_model(
            "vit_tiny_patch16_224", pretrained=False, img_size=32, patch_size=8, depth=2, num_classes=10
        )

    module = _build(make, device, dtype)
    rand = _Random(device, dtype)
    return Case(module, [((rand(batch, 3, 32, 32),), {}) for _ in range(steps)])
