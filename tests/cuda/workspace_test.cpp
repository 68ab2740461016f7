// SPDX-License-Identifier: Apache-2.0
// A workspace that does not begin where kernels read it by 32 bytes is refused by every launcher that takes one, before
// anything is launched.

#include "workspace.h"

#include <gtest/gtest.h>

#include "adaptive_heads.h"
#include "chunks.h"
#include "critical.h"
#include "expected.h"
#include "keydiff.h"
#include "last_query.h"
#include "layer_selector.h"
#include "mass_segmented.h"
#include "memory_attention.h"
#include "message_of.h"
#include "prompt_scores.h"
#include "ranks.h"
#include "rkv.h"
#include "triattention.h"
#include "window_attention.h"

namespace kvkeep::cuda::workspace_test {
namespace {

/// What a launcher says of a workspace that begins 8 bytes behind a multiple of 32. There is no row, so nothing of it
/// is read.
template <class Arguments>
std::string said_of(void (*launcher)(const Arguments&, Stream)) {
  Arguments arguments;
  arguments.workspace = reinterpret_cast<decltype(arguments.workspace)>(std::uintptr_t{4096 + 8});
  return testing::message_of<InvalidArgument>([&] { launcher(arguments, nullptr); });
}

TEST(Workspace, ThatIsNotAlignedIsRefusedByEveryLauncher) {
  const std::pair<const char*, std::string> all[] = {
      {"adaptive_heads", said_of(launch_adaptive_heads)},
      {"chunks", said_of(launch_chunks)},
      {"critical", said_of(launch_critical)},
      {"expected", said_of(launch_expected)},
      {"keydiff", said_of(launch_keydiff)},
      {"last query", said_of(launch_last_query)},
      {"layer selector", said_of(launch_layer_selector)},
      {"mass_segmented", said_of(launch_mass_segmented)},
      {"memory_attention", said_of(launch_memory_route)},
      {"memory_attention", said_of(launch_memory_merge)},
      {"prompt scores", said_of(launch_prompt_scores)},
      {"ranks", said_of(launch_ranks)},
      {"rkv", said_of(launch_rkv)},
      {"triattention", said_of(launch_triattention)},
      {"window_attention", said_of(launch_window_attention)},
      {"history_attention", said_of(launch_history_attention)},
  };
  for (const auto& [launcher, said] : all)
    EXPECT_EQ(said, std::string(launcher) + ": workspace: begins 8 bytes behind a multiple of 32; allowed at one");
}

}  // namespace
}  // namespace kvkeep::cuda::workspace_test
