"""Checks llama.cpp's own test vocabularies, whole, against their expected ids.

Needs jaxllm alone; run it in the root of the project with the path of llama.cpp's folder `models`
(in the source distribution of llama-cpp-python 0.3.36):

    python tests/data/tokenizers/check_ggml_vocabularies.py MODELS_FOLDER

It writes a line for each file: the texts whose ids are right, or why the file is not read. The
exit status is 1 if any id is wrong.
"""

import sys
from pathlib import Path

from jaxllm.checkpoint.gguf.reader import GGUFFile
from jaxllm.common.errors import JaxLLMError
from jaxllm.tokenizers import tokenizer_from_gguf


def main() -> None:
    all_right = True
    for file in sorted(Path(sys.argv[1]).glob("ggml-vocab-*.gguf")):
        inputs, outputs = Path(f"{file}.inp"), Path(f"{file}.out")
        try:
            tokenizer = tokenizer_from_gguf(GGUFFile(file).metadata)
        except JaxLLMError as error:
            print(f"{file.name}: not read: {str(error)[:80]}")
            continue
        if not inputs.exists():
            print(f"{file.name}: read; it has no expected ids")
            continue
        texts = inputs.read_bytes().decode("utf-8").split("\n__ggml_vocab_test__\n")
        rows = [[int(index) for index in line.split()] for line in outputs.read_text().split("\n")]
        pairs = list(zip(texts, rows, strict=False))
        right = sum(tokenizer.encode(t, add_special_tokens=False) == ids for t, ids in pairs)
        all_right = all_right and right == len(texts)
        print(f"{file.name}: {right} of {len(texts)} texts")
    sys.exit(0 if all_right else 1)


if __name__ == "__main__":
    main()
