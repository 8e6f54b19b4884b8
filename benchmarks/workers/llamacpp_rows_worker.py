"""llama.cpp as a peer for rows of many lengths: `python llamacpp_rows_worker.py MODEL.gguf` in an
environment with llama-cpp-python.

As its server does: a sequence that has ended makes room for the next prompt, which is read in the
same batch as the others' next tokens.
"""

import ctypes
import sys
from collections import deque
from pathlib import Path

import llama_cpp as llama
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from protocol import Rows, serve

BATCH = 2048
silent = llama.llama_log_callback(lambda level, text, data: None)
llama.llama_log_set(silent, ctypes.c_void_p(0))
llama.llama_backend_init()
model = llama.llama_model_load_from_file(sys.argv[1].encode(), llama.llama_model_default_params())
vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))


def context(work: Rows):
    room = -(-(max(map(len, work.rows)) + work.new) // 256) * 256
    params = llama.llama_context_default_params()
    params.n_ctx, params.n_seq_max = work.size * room, work.size
    params.n_batch, params.n_ubatch, params.n_threads, params.n_threads_batch = BATCH, 512, 2, 2
    params.kv_unified = False
    params.type_k = params.type_v = llama.GGML_TYPE_F32
    return llama.llama_init_from_model(model, params)


def run(work: Rows) -> int:
    ctx = context(work)
    memory = llama.llama_get_memory(ctx)
    batch = llama.llama_batch_init(BATCH, 0, 1)
    waiting = deque(sorted(work.rows, key=len, reverse=True))
    length: dict[int, int] = {}  # of each sequence that goes on: tokens that are read
    answers: dict[int, list[int]] = {}
    made = 0
    while waiting or answers:
        batch.n_tokens, ends = 0, {}
        for sequence in answers:
            ends[sequence] = add(batch, answers[sequence][-1], length[sequence], sequence, True)
            length[sequence] += 1
        for sequence in range(work.size):
            if sequence in answers or not waiting or batch.n_tokens + len(waiting[0]) > BATCH:
                continue
            prompt = waiting.popleft()
            for position, token in enumerate(prompt):
                last = position == len(prompt) - 1
                ends[sequence] = add(batch, token, position, sequence, last)
            length[sequence], answers[sequence] = len(prompt), []
        assert llama.llama_decode(ctx, batch) == 0
        for sequence, place in ends.items():
            logits = llama.llama_get_logits_ith(ctx, place)
            answers[sequence].append(int(np.ctypeslib.as_array(logits, (vocabulary,)).argmax()))
            if answers[sequence][-1] == work.eos or len(answers[sequence]) == work.new:
                made += len(answers.pop(sequence))
                llama.llama_memory_seq_rm(memory, sequence, -1, -1)
    llama.llama_batch_free(batch)
    llama.llama_free(ctx)
    return made


def add(batch, token: int, position: int, sequence: int, wanted: bool) -> int:
    """One token more in the batch; returns its place."""
    place = batch.n_tokens
    batch.token[place], batch.pos[place], batch.logits[place] = token, position, wanted
    batch.n_seq_id[place], batch.seq_id[place][0] = 1, sequence
    batch.n_tokens = place + 1
    return place


serve({"peer": "llama.cpp", "version": f"llama-cpp-python {llama.__version__}"}, run, Rows)
