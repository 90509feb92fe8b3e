"""The pocket tokenizer: sentencepiece BPE of 4096 pieces with byte fallback, and its tokenizer.json twin.

Newlines with the indentation that follows are pieces of their own; nothing is normalised or stripped.
Writes tokenizer.model, tokenizer.json and tokenizer_config.json into the target's folder, and the
token streams train.npy, held_library.npy, held_test.npy, held_chat.npy (uint16) into the work folder.

Command: python tokenizer.py --work WORK --out ../pocket/target
"""

import argparse
import io
import json
import os
import random

import numpy as np
import sentencepiece as spm
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

VOCAB = 4096
SEED = 21
BOS, EOS, PAD = "<|begin_of_text|>", "<|end_of_text|>", "<|finetune_right_pad|>"
CONTROL = ["eom", "eot", "start", "message", "image_start", "image_end", "video", "patch", "mask"]
CONTROL = [f"<|{name}|>" for name in CONTROL]
BREAKS = ["\n" * n + " " * k for n in (1, 2) for k in (0, 4, 8, 12, 16)] + ["\n" + " " * k for k in (2, 6, 20, 24)]
FIXED = [*BREAKS, "\t"]
LIBRARY_REPEATS = 2  # the library is shown twice for each showing of the tests


def train_pieces(texts, out):
    """Train sentencepiece on whole texts (cut every 4000 characters) and write tokenizer.model."""
    pieces = [text[i : i + 4000] for text in texts for i in range(0, len(text), 4000)]
    random.Random(SEED).shuffle(pieces)
    model = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(pieces), model_writer=model, vocab_size=VOCAB,
        model_type="bpe", character_coverage=0.9995, byte_fallback=True, normalization_rule_name="identity",
        add_dummy_prefix=False, remove_extra_whitespaces=False, allow_whitespace_only_pieces=True,
        split_by_unicode_script=False, split_digits=True, max_sentencepiece_length=16, max_sentence_length=20000,
        unk_id=0, bos_id=1, eos_id=2, pad_id=3, bos_piece=BOS, eos_piece=EOS, pad_piece=PAD,
        control_symbols=CONTROL, user_defined_symbols=[name.replace(" ", "\u2581") for name in FIXED],
        num_threads=2, minloglevel=2,
    )  # fmt: skip
    with open(os.path.join(out, "tokenizer.model"), "wb") as file:
        file.write(model.getvalue())


def convert(out):
    """Write tokenizer.json: the same pieces as a BPE with ranked merges, breaks and controls as added tokens."""
    sp = spm.SentencePieceProcessor(model_file=os.path.join(out, "tokenizer.model"))
    names = [sp.id_to_piece(i) for i in range(sp.get_piece_size())]
    spaced = [name.replace("\u2581", " ") if i < first_learned(sp) else name for i, name in enumerate(names)]
    vocab = {name: i for i, name in enumerate(spaced)}
    learned = list(range(first_learned(sp), len(names)))
    merges = []
    for i in learned:
        splits = [(names[i][:k], names[i][k:]) for k in range(1, len(names[i]))]
        splits = [(a, b) for a, b in splits if vocab.get(a, -1) >= learned[0] and vocab.get(b, -1) >= learned[0]]
        merges += sorted(splits, key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
    tok = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=False))
    tok.normalizer = normalizers.Replace(" ", "\u2581")
    tok.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    tok.add_special_tokens(
        [AddedToken(name, normalized=False, special=True) for name in ["<unk>", BOS, EOS, PAD, *CONTROL]]
    )
    tok.add_tokens([AddedToken(name, normalized=False) for name in FIXED])
    tok.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, vocab[BOS])]
    )
    assert tok.get_vocab_size() == VOCAB, tok.get_vocab_size()
    tok.save(os.path.join(out, "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS, "pad_token": PAD,
        "unk_token": "<unk>", "add_bos_token": True, "clean_up_tokenization_spaces": False, "model_max_length": 4096,
    }  # fmt: skip
    with open(os.path.join(out, "tokenizer_config.json"), "w") as file:
        json.dump(config, file, indent=2)
    return tok, sp


def first_learned(sp):
    """Id of the first piece that is neither control, user-defined nor a byte."""
    return next(i for i in range(1, sp.get_piece_size()) if not (sp.is_control(i) or sp.is_byte(i) or is_fixed(sp, i)))


def is_fixed(sp, i):
    return sp.id_to_piece(i).replace("\u2581", " ") in FIXED


def stream(tok, items):
    """Token stream of documents, each with its begin and end token, and the bytes of text in it."""
    ids, size = [], 0
    for item in items:
        if item["kind"] == "chat":
            ids += tok.encode(item["text"], add_special_tokens=False).ids
        else:
            ids += [*tok.encode(item["text"]).ids, tok.token_to_id(EOS)]
        size += len(item["text"].encode())
    return np.array(ids, dtype=np.uint16), size


def read(work, name):
    with open(os.path.join(work, f"{name}.json"), encoding="utf-8") as file:
        return json.load(file)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", required=True)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    os.makedirs(args.out, exist_ok=True)
    names = ("train", "held", "chat_train", "chat_held")
    parts = {name: read(args.work, name) for name in names}
    train_pieces([item["text"] for item in parts["train"]], args.out)
    tok, sp = convert(args.out)
    library = [item for item in parts["train"] if item["kind"] == "library"]
    documents = parts["train"] + library * (LIBRARY_REPEATS - 1) + parts["chat_train"]
    random.Random(SEED).shuffle(documents)
    streams = {"train": documents, "held_chat": parts["chat_held"]}
    for kind in ("library", "test"):
        streams[f"held_{kind}"] = [item for item in parts["held"] if item["kind"] == kind]
    sizes = {}
    for name, items in streams.items():
        ids, sizes[name] = stream(tok, items)
        np.save(os.path.join(args.work, f"{name}.npy"), ids)
        print(
            name,
            len(items),
            "documents",
            len(ids),
            "tokens",
            sizes[name],
            "bytes",
            round(sizes[name] / len(ids), 3),
            "bytes per token",
        )
    with open(os.path.join(args.work, "bytes.json"), "w") as file:
        json.dump(sizes, file)
    sample = [item["text"] for item in parts["held"]][:20]
    same = sum(tok.encode(t, add_special_tokens=False).ids == sp.encode(t) for t in sample)
    lossless = sum(tok.decode(tok.encode(t).ids) == t for t in sample)
    print(f"tokenizer.json equals tokenizer.model on {same}, is lossless on {lossless} of {len(sample)} held-out files")


if __name__ == "__main__":
    main()
