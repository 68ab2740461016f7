// SPDX-License-Identifier: Apache-2.0
#pragma once
/// The parts of a training program's main().

namespace train {

/// Returns run(argc, argv). Prints an exception as one sentence after `name`; returns 2 for a kvkeep::Error, else 1.
int run_program(const char* name, int (*run)(int argc, char** argv), int argc, char** argv);

/// Tensors of a few MB come and go thousands of times a second: fetching them from the kernel each time costs more than
/// the arithmetic. `arenas`: malloc's, one per thread that allocates at the same time.
void keep_freed_memory(int arenas);

}  // namespace train
