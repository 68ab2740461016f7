#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# A run that is stopped and resumed ends with the bytes of one that was not, also with another number of threads.
# usage: resume_test.sh PROGRAM MODEL FOLDER
set -eu
program=$1 model=$2 folder=$3
rm -rf "$folder" && mkdir -p "$folder"
train() {
  out=$1
  shift
  "$program" --model "$model" --out "$folder/$out" --schedule 256:3:3,384:2:3 --held-out 2 --check-every 2 --lr 0.01 \
    --max-span 16 "$@" 2>> "$folder/log"
}
train whole.safetensors --threads 1
status=0
train halves.safetensors --threads 2 --stop-after 2 || status=$?
test "$status" = 130
test ! -e "$folder/halves.safetensors"
status=0
train halves.safetensors --resume --lr 0.02 || status=$?
test "$status" = 2 # other options are refused
status=0
train halves.safetensors --resume --threads 2 --stop-after 3 || status=$?
test "$status" = 130
train halves.safetensors --resume --threads 1
cmp "$folder/whole.safetensors" "$folder/halves.safetensors"

# Ctrl-C: the step in progress ends, the checkpoint is whole, and nothing else is left behind.
"$program" --model "$model" --out "$folder/long.safetensors" --schedule 256:2:100000 \
  --check-every 0 --log-every 1 2> "$folder/long.log" &
job=$!
tries=0
until grep -q "step 2/" "$folder/long.log" 2> /dev/null || [ "$tries" -ge 600 ]; do
  tries=$((tries + 1))
  sleep 0.1
done
kill -INT "$job"
status=0
wait "$job" || status=$?
test "$status" = 130
test -s "$folder/long.safetensors.checkpoint"
test ! -e "$folder/long.safetensors"
test ! -e "$folder/long.safetensors.checkpoint.part"
rm -rf "$folder"
