"""Write the trained models in the published layout (bfloat16 safetensors, transformers' names) and check them there.

Commands: python publish.py target --work WORK     python publish.py check --work WORK
"""

import argparse
import json
import os

import numpy as np
import torch
from blocks import DRAFTER_CONFIG, Drafter
from dflash2 import DFLASH2_CONFIG, Drafter2
from lean import Matrix, Target
from safetensors.torch import load_file, save_file
from target import HERE, SEED, TEXT_CONFIG, TOKEN

PREFIX = "model.language_model."
DRAFTERS = {"drafter": Drafter, "drafter2": Drafter2}  # by the name of their folder
CONFIGS = {Drafter: DRAFTER_CONFIG, Drafter2: DFLASH2_CONFIG}
# transformers builds a vision tower whether or not the file has one; this one is as small as it allows.
VISION_CONFIG = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 4,
    "patch_temporal": 2, "merge_size": 2, "max_position_embeddings": 16, "pos_emb_height": 4, "pos_emb_width": 4,
    "layer_types": ["window_attention", "full_attention"],
    "rope_parameters": {"rope_type": "axial", "rope_theta": 10000.0},
}  # fmt: skip


def published_name(name):
    return name if name.startswith("lm_head") else PREFIX + name


def fill_unused_rows(table, seen):
    """Give the rows of tokens that training never showed a seeded random direction and the typical row norm."""
    generator = torch.Generator().manual_seed(SEED)
    typical = table[seen].norm(dim=-1).median()
    fresh = torch.randn(table.shape, generator=generator)
    table[~seen] = (fresh / fresh.norm(dim=-1, keepdim=True) * typical)[~seen]


def save_target(model, stream, out):
    """Write config.json, generation_config.json and model.safetensors of the target."""
    from transformers import GenerationConfig, MuseGlimmerConfig

    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    seen = torch.zeros(TEXT_CONFIG["vocab_size"], dtype=torch.bool)
    seen[np.unique(stream).astype(np.int64)] = True
    fill_unused_rows(weights["embed_tokens.weight"], seen)
    config = MuseGlimmerConfig(
        text_config=TEXT_CONFIG, vision_config=VISION_CONFIG, out_hidden_size=128, projector_hidden_size=48,
        image_token_id=TOKEN["patch"], video_token_id=TOKEN["video"],
    )  # fmt: skip
    config.architectures, config.dtype = ["MuseGlimmerForConditionalGeneration"], "bfloat16"
    config.save_pretrained(out)
    stops = [TOKEN["end_of_text"], TOKEN["eot"]]  # not eom: reasoning ends with it
    GenerationConfig(
        bos_token_id=TOKEN["begin_of_text"], eos_token_id=stops, pad_token_id=TOKEN["finetune_right_pad"]
    ).save_pretrained(out)
    write_tensors({published_name(name): w for name, w in weights.items()}, out)


def load_target(folder, dtype=torch.float32):
    """The lean model with the published (bfloat16-rounded) weights, for evaluation."""
    model = Target(TEXT_CONFIG, dtype)
    saved = load_file(os.path.join(folder, "model.safetensors"))
    model.load_state_dict({name: saved[published_name(name)].float() for name in model.state_dict()})
    for module in model.modules():  # the rounded values fit, and need no cast at every call
        if isinstance(module, Matrix):
            module.weight.data = module.weight.data.to(dtype)
    return model.eval().requires_grad_(False)


def save_drafter(model, out):
    """Write config.json and model.safetensors of a drafter."""
    os.makedirs(out, exist_ok=True)
    with open(os.path.join(out, "config.json"), "w") as file:
        json.dump(CONFIGS[type(model)], file, indent=2)
    write_tensors({name: p.detach() for name, p in model.named_parameters()}, out)


def write_tensors(weights, out):
    """Write model.safetensors in bfloat16, first beside, then renamed."""
    path = os.path.join(out, "model.safetensors")
    save_file(
        {name: w.to(torch.bfloat16).contiguous() for name, w in weights.items()},
        path + ".part",
        metadata={"format": "pt"},
    )
    os.chmod(path + ".part", 0o644)
    os.replace(path + ".part", path)


def load_drafter(folder, dtype=torch.float32):
    """The drafter that a folder's name says, with the published weights."""
    model = DRAFTERS[os.path.basename(os.path.normpath(folder))](dtype=dtype)
    model.load_state_dict({name: w.float() for name, w in load_file(os.path.join(folder, "model.safetensors")).items()})
    return model.eval().requires_grad_(False)


def check_target(folder, stream):
    """Largest logit difference between the lean forward and transformers on real text longer than the window."""
    from transformers import MuseGlimmerForConditionalGeneration

    truth = MuseGlimmerForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    ids = torch.from_numpy(stream[: 2 * 384].astype(np.int64)).view(2, 384)
    with torch.no_grad():
        model = load_target(folder)
        out = truth(input_ids=ids, use_cache=False, output_hidden_states=True)
        outs = model.trunk(ids)
        taps = max((a - b).abs().max().item() for a, b in zip(outs[:-1], out.hidden_states[1:-1], strict=True))
        return (model.logits(outs[-1]) - out.logits).abs().max().item(), taps


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["target", "check"])
    parser.add_argument("--work", required=True)
    parser.add_argument("--out", default=os.path.join(HERE, "..", "pocket"))
    args = parser.parse_args()
    torch.set_num_threads(2)
    folder = os.path.join(args.out, "target")
    if args.what == "target":
        model = Target(TEXT_CONFIG)
        state = torch.load(os.path.join(args.work, "target.pt"), weights_only=True)
        model.load_state_dict(state["model"])
        save_target(model, np.load(os.path.join(args.work, "train.npy")), folder)
        print(json.dumps({"steps": state["step"], "parameters": sum(p.numel() for p in model.parameters())}))
    logits, taps = check_target(folder, np.load(os.path.join(args.work, "held_test.npy")))
    print(f"largest difference from transformers in float32: logits {logits:.2e}, layer outputs {taps:.2e}")


if __name__ == "__main__":
    main()
