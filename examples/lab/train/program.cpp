// SPDX-License-Identifier: Apache-2.0
#include "program.h"

#include <malloc.h>

#include <cstdio>
#include <exception>

#include "kvkeep/core/error.h"
#include "kvkeep/io/run_files.h"
#include "kvkeep/torch.h"

namespace train {

int run_program(const char* name, int (*run)(int argc, char** argv), int argc, char** argv) {
  kvkeep::use_torch();
  const kvkeep::UsingThreads threads(kvkeep::torch_threads());
  kvkeep::io::leave_no_unfinished_files();
  const auto say = [name](const std::exception& error) {
    std::fprintf(stderr, "%s: %s\n", name, kvkeep::escaped(error.what()).c_str());
  };
  try {
    return run(argc, argv);
  } catch (const kvkeep::Error& error) {
    say(error);
    return 2;
  } catch (const std::exception& error) {
    say(error);
    return 1;
  }
}

void keep_freed_memory(int arenas) {
  mallopt(M_ARENA_MAX, arenas);
  mallopt(M_MMAP_THRESHOLD, 1 << 25);
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
}

}  // namespace train
