// SPDX-License-Identifier: Apache-2.0
#pragma once
/// A trace in memory: changed by a test, written to a file of the test's own, and replayed.

#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <string>

#include "arrays.h"
#include "kvkeep/core/error.h"
#include "kvkeep/io/safetensors.h"
#include "kvkeep/policy/registry.h"
#include "kvkeep/trace/trace.h"

namespace kvkeep::testing {

struct ReplayedTrace {
  trace::Result (*run)(const io::SafetensorsFile& file, const KVPolicy& policy);
  std::map<std::string, Array> tensors = {};
  std::map<std::string, std::string> metadata = {};

  [[nodiscard]] trace::Result replay(const std::string& policy) const { return replay(*make_policy(policy)); }
  [[nodiscard]] trace::Result replay(const KVPolicy& policy) const {
    const ::testing::TestInfo& test = *::testing::UnitTest::GetInstance()->current_test_info();
    const std::filesystem::path file = std::filesystem::path(::testing::TempDir()) /
                                       text("replayed_", test.test_suite_name(), "_", test.name(), ".safetensors");
    io::write_safetensors(file, {tensors.begin(), tensors.end()}, metadata);
    const trace::Result result = run(io::SafetensorsFile::open(file), policy);
    std::filesystem::remove(file);
    return result;
  }

  void expect_refused(const auto& policy, const std::string& words) const {
    try {
      static_cast<void>(replay(policy));
      ADD_FAILURE() << "was accepted; the message should have said: " << words;
    } catch (const InvalidArgument& e) {
      EXPECT_NE(std::string(e.what()).find(words), std::string::npos) << e.what();
    }
  }
};

}  // namespace kvkeep::testing
