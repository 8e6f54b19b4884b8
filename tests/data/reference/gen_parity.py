"""Reference outputs of whole checkpoints, from torch transformers in float32 on the CPU.

    python gen_parity.py [names...]      # default: the tiny-* folders beside this file

Needs torch and transformers; writes <name>.npz beside this file. Other checkpoints (smollm2_text)
are looked for in the folder $REFERENCE_MODELS.

Keys: input_ids, attention_mask, [position_ids], [decoder_input_ids], logits; greedy (with
greedy_margin, top-1 minus top-2 logit of each step), greedy_eos, beam4 (with beam4_scores),
beam4_eos; hidden_<i> or enc_hidden_<i> and dec_hidden_<i> (tiny models only); meta (json).
Padding is on the left for decoder-only models (position_ids = cumsum(mask) - 1, 1 at pads), on the
right for T5. *_eos: EOS enabled (its id in meta, pad 0 after it); the others: EOS disabled, exactly
32 new tokens. Generated rows contain the prompt (decoder-only) or the start token 0 (T5).
Beams: num_beams=4, num_return_sequences=4, length_penalty=1, early_stopping=False.
"""

import json
import os
import sys

import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

transformers.logging.set_verbosity_error()
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 2)))
HERE = os.path.dirname(os.path.abspath(__file__))
MODELS = os.environ.get("REFERENCE_MODELS", HERE)
NEW = 32
ALL = ["tiny-llama", "tiny-gpt2", "tiny-t5", "tiny-t5-v1_1"]


def npy(t):
    return t.detach().cpu().numpy()


@torch.inference_mode()
def run(name):
    d = f"{MODELS}/{name.split('_text')[0]}"
    cfg = AutoConfig.from_pretrained(d)
    s2s = cfg.is_encoder_decoder
    tiny = name.startswith("tiny")
    m = (
        AutoModelForSeq2SeqLM.from_pretrained(d, dtype=torch.float32)
        if s2s
        else AutoModelForCausalLM.from_pretrained(
            d, dtype=torch.float32, attn_implementation="eager"
        )
    ).eval()
    eos = cfg.eos_token_id
    rs = np.random.RandomState(0)
    out = {}
    if name.endswith("_text"):
        tk = AutoTokenizer.from_pretrained(d)
        tk.padding_side = "left"
        P = [
            "What is the capital of France?",
            "Write one sentence about the sea.",
            "List three prime numbers.",
        ]
        S = [f"<|im_start|>user\n{p}<|im_end|>\n<|im_start|>assistant\n" for p in P]
        e = tk(S, return_tensors="np", padding=True, add_special_tokens=False)
        ids, mask = e["input_ids"].astype(np.int64), e["attention_mask"].astype(np.int64)
    else:
        T = 16
        lens = [5, 11, 16]
        ids = rs.randint(10, min(cfg.vocab_size, 32000), size=(3, T)).astype(np.int64)
        mask = np.zeros_like(ids)
        for i, length in enumerate(lens):
            if s2s:
                mask[i, :length] = 1
            else:
                mask[i, T - length :] = 1
        ids = np.where(mask == 1, ids, 0)
    ids_t, mask_t = torch.from_numpy(ids), torch.from_numpy(mask)
    out.update(input_ids=ids, attention_mask=mask)
    if s2s:
        dec = np.concatenate(
            [np.zeros((3, 1), np.int64), rs.randint(10, min(cfg.vocab_size, 32000), size=(3, 9))], 1
        )
        o = m(
            input_ids=ids_t,
            attention_mask=mask_t,
            decoder_input_ids=torch.from_numpy(dec),
            output_hidden_states=True,
            use_cache=False,
        )
        out.update(
            decoder_input_ids=dec, encoder_last_hidden_state=npy(o.encoder_last_hidden_state)
        )
        if tiny:
            for i, h in enumerate(o.encoder_hidden_states):
                out[f"enc_hidden_{i}"] = npy(h)
            for i, h in enumerate(o.decoder_hidden_states):
                out[f"dec_hidden_{i}"] = npy(h)
    else:
        pos = np.where(mask == 1, mask.cumsum(1) - 1, 1)
        out["position_ids"] = pos
        o = m(
            input_ids=ids_t,
            attention_mask=mask_t,
            position_ids=torch.from_numpy(pos),
            output_hidden_states=True,
            use_cache=False,
        )
        if tiny:
            for i, h in enumerate(o.hidden_states):
                out[f"hidden_{i}"] = npy(h)
    out["logits"] = npy(o.logits)
    gc = m.generation_config
    gc.pad_token_id = 0

    def g(e, **k):
        gc.eos_token_id = e
        return m.generate(
            input_ids=ids_t,
            attention_mask=mask_t,
            do_sample=False,
            max_new_tokens=NEW,
            return_dict_in_generate=True,
            **k,
        )

    r = g(None, num_beams=1, output_logits=True)
    out["greedy"] = npy(r.sequences)
    tp = torch.stack(r.logits, 1).topk(2, -1).values
    out["greedy_margin"] = npy(tp[..., 0] - tp[..., 1])
    # A random model rarely emits its own EOS: the *_eos runs take a token of row 1's greedy run.
    e2 = eos
    if not name.endswith("_text"):
        e2 = int(out["greedy"][1, (1 if s2s else ids.shape[1]) + 7])
    r = g(e2, num_beams=1)
    out["greedy_eos"] = npy(r.sequences)
    bk = {
        "num_beams": 4,
        "num_return_sequences": 4,
        "length_penalty": 1.0,
        "early_stopping": False,
        "output_scores": True,
    }
    r = g(None, **bk)
    out["beam4"] = npy(r.sequences)
    out["beam4_scores"] = npy(r.sequences_scores)
    r = g(e2, **bk)
    out["beam4_eos"] = npy(r.sequences)
    out["beam4_eos_scores"] = npy(r.sequences_scores)
    meta = {
        "name": name,
        "eos_for_eos_runs": e2,
        "pad": 0,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "min_greedy_margin": float(out["greedy_margin"].min()),
    }
    out["meta"] = json.dumps(meta)
    np.savez_compressed(f"{HERE}/{name}.npz", **out)
    print(
        name,
        {
            k: getattr(v, "shape", None)
            for k, v in out.items()
            if k in ("logits", "greedy", "greedy_eos", "beam4", "beam4_eos")
        },
        meta,
        flush=True,
    )
    if name.endswith("_text"):
        print(tk.batch_decode(out["greedy_eos"][:, ids.shape[1] :], skip_special_tokens=True))


for requested in sys.argv[1:] or ALL:
    run(requested)
