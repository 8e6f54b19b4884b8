"""Compare one result of a library under test with an expected case (pure numpy + stdlib).

    import json, compare
    for case in json.load(open("cases.json"))["cases"]:
        problems = compare.check(case, my_run(case), arrays)      # [] = pass
`my_run(case)` returns, by case["kind"]:
  generate      {"sequences": [[int]], "sequences_scores": [float] (beams),
                 "step_token_scores": [[float|None]] (optional),
                 "first_step_scores": array (record=first_step cases)}
  processor     {"scores": [[float]]}
  forward       {"logits": array, ...}
  distribution  see check_distribution
`arrays` = numpy.load(".../arrays.npz").
Only the tokens up to and including the first generated EOS of a row are compared: any filler after.
"""

import json
import os

import numpy as np

HERE = os.path.dirname(os.path.abspath(__file__))


def model_dir(case, name=None):
    name = name or case["model"]
    return os.path.join(HERE, "models", name)


def eos_ids(case):
    e = case["generate_kwargs"].get("eos_token_id")
    if e is None:
        with open(os.path.join(model_dir(case), "generation_config.json")) as f:
            e = json.load(f).get("eos_token_id")
    return set() if e is None else {e} if isinstance(e, int) else set(e)


def prompt_len(case):
    if "t5" in case["model"]:
        return len(case["inputs"].get("decoder_input_ids", [[0]])[0])
    if "inputs_embeds" in case.get("array_inputs", {}):
        return 0
    return len(case["inputs"]["input_ids"][0]) if case["inputs"].get("input_ids") else 1


def useful(case, row):
    eos, n = eos_ids(case), prompt_len(case)
    for i in range(n, len(row)):
        if row[i] in eos:
            return list(row[: i + 1])
    return list(row)


def check(case, got, arrays=None, atol=2e-3):
    exp, bad = case["expected"], []
    if case["kind"] == "processor":
        a, b = (
            np.array([[float(v) for v in r] for r in m]) for m in (exp["scores"], got["scores"])
        )
        if a.shape != b.shape or not np.allclose(a, b, atol=1e-4, rtol=1e-4, equal_nan=True):
            bad.append("scores differ")
        return bad
    if case["kind"] == "forward":
        for key in exp["arrays"]:
            k = key.split("/", 1)[1]
            a, b = arrays[key], np.asarray(got[k])
            if "attention_mask" in case["inputs"] and (k != "logits" or "t5" not in case["model"]):
                m = np.array(case["inputs"]["attention_mask"]).astype(bool)
                a, b = a[m], b[m]
            if not np.allclose(a, b, atol=atol, rtol=1e-3):
                bad.append(f"{k}: max diff {np.abs(a - b).max():.2e}")
        return bad
    if case.get("record") == "first_step":
        a, b = arrays[case["id"] + "/first_step_scores"], np.asarray(got["first_step_scores"])
        fa, fb = np.isfinite(a), b > -1e20
        if a.shape != b.shape or (fa != fb).any():
            return ["set of kept tokens differs"]
        return [] if np.allclose(a[fa], b[fa], atol=atol, rtol=1e-3) else ["kept scores differ"]
    a, b = exp["sequences"], [list(map(int, r)) for r in got["sequences"]]
    if len(a) != len(b):
        return [f"{len(b)} rows, expected {len(a)}"]
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        stop = (
            case.get("tokenizer") is not None
        )  # stop strings / healing: filler after the stop is pad as well
        x2, y2 = useful(case, x), useful(case, y)
        if (x2 != y2) if not stop else (x2[: len(y2)] != y2[: len(x2)]):
            bad.append(f"row {i}: {y2} expected {x2}")
    for k in ("sequences_scores", "step_token_scores"):
        if not bad and k in exp and got.get(k) is not None:
            fx = [np.nan if v is None else v for v in np.array(exp[k], dtype=object).ravel()]
            fy = [np.nan if v is None else v for v in np.array(got[k], dtype=object).ravel()][
                : len(fx)
            ]
            m = np.isfinite(np.array(fx, float))
            if not np.allclose(
                np.array(fx, float)[m], np.array(fy, float)[m], atol=atol, rtol=1e-3
            ):
                bad.append(k + " differ")
    return bad


def check_distribution(case, pairs):
    """Largest absolute z-score of the sampled `pairs` (token1, token2), and the impossible draws.

    Over token1 and joint cells with expected count >= 5; |z| > 4.5 or any impossible draw = fail.
    """
    n, e = len(pairs), case["expected"]
    z, impossible = 0.0, 0
    first, joint = {}, {}
    for a, b in pairs:
        first[a] = first.get(a, 0) + 1
        joint[a, b] = joint.get((a, b), 0) + 1
        if str(a) not in e["p_first"] or str(b) not in e["p_joint"][str(a)]:
            impossible += 1
    for a, p in e["p_first"].items():
        if n * p >= 5:
            z = max(z, abs(first.get(int(a), 0) - n * p) / np.sqrt(n * p * (1 - p) + 1e-9))
        for b, q in e["p_joint"][a].items():
            if n * q >= 5:
                z = max(
                    z, abs(joint.get((int(a), int(b)), 0) - n * q) / np.sqrt(n * q * (1 - q) + 1e-9)
                )
    return z, impossible
