// SPDX-License-Identifier: Apache-2.0
#pragma once
// What a policy costs and what it keeps, in llama.cpp: the tables of docs/reference/llama.md.

#include "engine.h"

/// Tokens/s behind a prompt of random tokens, every policy in a context of its own, in turns.
void bench(const Options& o);
/// A long text, token by token: what each policy foretells, and how fast.
void perplexity(const Options& o);
/// Text without an end: speed, memory, and what is left of it.
void endless(const Options& o);
/// Samples of `kvkeep eval --samples-out`: the prompt is cut as it ends, then comes the question.
void answer(const Options& o);
/// Events on o.device, over a cache in the memory of that device, against events on the CPU over host memory: the same
/// tokens, one row per policy. False: they differ by more than roundings.
bool check(const Options& o);
