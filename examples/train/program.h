#pragma once
/// What the main() of a training program is made of.

namespace train {

/// run(argc, argv), with what it throws as one sentence behind `name`: 2 for what was asked wrong, 1 for the rest.
int run_program(const char* name, int (*run)(int argc, char** argv), int argc, char** argv);

/// Tensors of a few MB come and go thousands of times a second: fetching them from the kernel each time costs more than
/// the arithmetic. `arenas`: of malloc, for as many threads that allocate at once.
void keep_freed_memory(int arenas);

}  // namespace train
