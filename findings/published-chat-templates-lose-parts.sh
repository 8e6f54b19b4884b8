#!/usr/bin/env bash
# Published chat templates lose text of a message whose content is a list of parts, without an error.
#
# A template that loops over the parts of the user's messages need not do so for other messages. The
# templates of Mistral-Small-3.2-24B-Instruct-2506 and Devstral-Small-2507 look up the first part of
# a system message and drop all others. That of gemma-4-31B-it trims a system message that is a list
# as if it were a text, and so writes Python's form of the list into the prompt. The user's message
# of the same conversation is complete in all three. Of the 70 templates in this folder of llama.cpp
# they are among those that loop over parts, and so are taken for templates that accept them.
#
# Seen on 2026-11-28 with the templates of llama-cpp-python 0.3.36 (source distribution), rendered by
# transformers 5.24.0, Python 3.11:
#   Mistral-Small-3.2-24B-Instruct-2506  [SYSTEM_PROMPT]Be [/SYSTEM_PROMPT][INST]What is it?[/INST]
#   unsloth-mistral-Devstral-Small-2507  [SYSTEM_PROMPT]Be [/SYSTEM_PROMPT][INST]What is it?[/INST]
#   google-gemma-4-31B-it                [{'type': 'text', 'text': 'Be '}, ...
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install transformers==5.24.0 jinja2==3.1.6
cd "$folder"
venv/bin/pip --quiet download --no-deps --no-binary llama-cpp-python llama-cpp-python==0.3.36
venv/bin/python - <<'PYTHON'
import glob
import tarfile

from transformers.utils.chat_template_utils import render_jinja_template


def parts(*texts):
    return [{"type": "text", "text": text} for text in texts]


chat = [
    {"role": "system", "content": parts("Be ", "brief.")},
    {"role": "user", "content": parts("What ", "is it?")},
]
losses = {
    "Mistral-Small-3.2-24B-Instruct-2506": "[SYSTEM_PROMPT]Be [/SYSTEM_PROMPT]",
    "unsloth-mistral-Devstral-Small-2507": "[SYSTEM_PROMPT]Be [/SYSTEM_PROMPT]",
    "google-gemma-4-31B-it": "[{'type': 'text', 'text': 'Be '}, {'type': 'text', 'text': 'brief.'}]",
}
with tarfile.open(glob.glob("llama_cpp_python-*.tar.gz")[0]) as archive:
    for name, loss in losses.items():
        (member,) = [m for m in archive.getmembers() if m.name.endswith(f"/templates/{name}.jinja")]
        template = archive.extractfile(member).read().decode()
        (text,), _ = render_jinja_template([chat], chat_template=template, bos_token="<s>")
        print(f"{name:37}{text!r}")
        assert loss in text, text
        assert "What" in text and "is it?" in text, text
        whole = [{**m, "content": "".join(p["text"] for p in m["content"])} for m in chat]
        (plain,), _ = render_jinja_template([whole], chat_template=template, bos_token="<s>")
        assert "Be brief." in plain, plain
PYTHON
