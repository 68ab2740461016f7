// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Files of saved sequences, and the rows that an engine brings to where they are restored.

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "engines.h"

namespace kvkeep::testing {

/// A path of this test alone; what lies there goes with it.
struct StateFileOfATest {
  explicit StateFileOfATest(const std::string& name)
      : path(std::filesystem::temp_directory_path() / text("kvkeep-restore-", name, "-", ::getpid())) {
    std::filesystem::remove(path);
  }
  ~StateFileOfATest() { std::filesystem::remove(path); }
  StateFileOfATest(const StateFileOfATest&) = delete;
  StateFileOfATest& operator=(const StateFileOfATest&) = delete;
  [[nodiscard]] std::string bytes() const {
    std::ifstream in(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
  }
  void write(const std::string& bytes) const { std::ofstream(path, std::ios::binary) << bytes; }
  std::filesystem::path path;
};

/// Saves a sequence here and restores it there, with its rows of the cache, in other places or pages.
inline void bring_over(engines::Engine& here, engines::Engine& there, SequenceId id,
                       const std::filesystem::path& file) {
  here.keeper.save(id, file);
  there.keeper.restore(id, file);
  there.lengths[id] = here.lengths.at(id);
  if (auto* paged = dynamic_cast<engines::PagedEngine*>(&there))
    ASSERT_TRUE(paged->sequences.admit(id, *std::ranges::max_element(there.lengths.at(id))).given());
  for (std::int32_t r = 0; r < engines::kRows; ++r)
    for (std::int32_t t = 0; t < here.lengths.at(id)[static_cast<std::size_t>(r)]; ++t)
      for (const engines::Sided side : engines::kAllSides)
        there.slot_of(id, r / engines::kHeads, r % engines::kHeads, t, side)
            .copy_(here.slot_of(id, r / engines::kHeads, r % engines::kHeads, t, side));
}

}  // namespace kvkeep::testing
