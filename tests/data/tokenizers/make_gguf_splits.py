"""Makes gguf_splits.json: how llama.cpp splits texts by each name of ``tokenizer.ggml.pre``.

Needs gguf; run it in this folder with the paths of llama.cpp's source (that of llama-cpp-python
0.3.36) and of a program that splits with it:

    python make_gguf_splits.py LLAMA_CPP_FOLDER SPLIT

``SPLIT FILE`` loads a vocabulary and writes four digits with spaces between them: ``add_bos``,
``add_eos``, ``ignore_merges`` and ``byte_encode`` of it. Then it reads texts in hexadecimal, one a
line, and writes for each the parts of ``unicode_regex_split``, in hexadecimal too. Names that
llama.cpp reads without bytes (``byte_encode``) are left out.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import gguf
from texts import TEXTS

HERE = Path(__file__).parent
SOURCE, SPLIT = Path(sys.argv[1]), sys.argv[2]
MORE = [
    "HELLO World camelCase iPhone HTMLParser",
    "don't I'LL we'Ve 'tis THEY'RE y'all's",
    "1234567 12,345.67 x1y22 1st",
    "a\n\n  b\r\n\tc   d \n   \n",
    "foo_bar(baz)[1]{2} // x\n\n#include <a.h>",
    "Привет, мир! ΑΒΓ αβγ Ǆ",
    "你好\uff0c世界。123abc「かな」カナ",
    "한국어 텍스트 12",
    "x = y**2 + 3.14e-5;\n/*a*/\r\n",
    "საქართველო Հայերեն ՀԱՅ",
    "१२३ ٤٥٦ Ⅷ ① ½",
    "हिन्दी ภาษาไทย עברית العربية",
    "İstanbul'dediler l'llama",
    "$5.00 <b>^2~3`x`|y|",
]


def split(file: Path, pre: str, texts: list[str]) -> tuple[list[int], list[list[int]]] | None:
    """The flags of a name, and the lengths of each text's parts."""
    spec = json.loads((HERE / "fast" / "gpt2.json").read_text(encoding="utf-8"))
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(list(spec["model"]["vocab"]))
    writer.add_token_merges([" ".join(pair) for pair in spec["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    lines = "".join(f"{text.encode().hex()}\n" for text in texts)
    run = subprocess.run([SPLIT, file], input=lines, capture_output=True, text=True, check=False)
    if run.returncode != 0:
        return None
    first, *rows = run.stdout.split("\n")
    *flags, byte_encode = map(int, first.split()[-4:])
    if not byte_encode:
        return None
    parts = [[len(bytes.fromhex(part).decode()) for part in row.split()] for row in rows]
    return flags, parts[: len(texts)]


def main() -> None:
    source = (SOURCE / "src" / "llama-vocab.cpp").read_text(encoding="utf-8")
    texts = [text for text in [*TEXTS, *MORE] if text]
    names: dict[str, list[int]] = {}
    splits: list[list[list[int]]] = []
    with tempfile.TemporaryDirectory() as folder:
        for pre in sorted(set(re.findall(r'tokenizer_pre == "([^"]+)"', source))):
            found = split(Path(folder) / "a.gguf", pre, texts)
            if found is not None:
                flags, parts = found
                if parts not in splits:
                    splits.append(parts)
                names[pre] = [*flags, splits.index(parts)]
    content = {"texts": texts, "names": names, "splits": splits}
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    (HERE / "gguf_splits.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
