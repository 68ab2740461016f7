// SPDX-License-Identifier: Apache-2.0
#include "kvkeep/io/kept_page.h"

#include <gtest/gtest.h>

#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "kvkeep/core/error.h"

namespace kvkeep::kept_page_test {
namespace {

using nlohmann::json;

io::KeptText two_layers() {
  io::KeptText text{.model = "tiny", .policy = "tova,budget=2", .prompt = 3, .layers = {0, 5}, .kv_heads = 2};
  text.pieces = {"A", "b", "c", "d", "e"};
  text.stops = {{"event 1", 4, 64, {{0, 1, 3}, {2, 3}, {}, {0}}}, {"the end", 5, 80, {{0, 4}, {1, 2, 3, 4}, {4}, {0}}}};
  return text;
}

json data_of(const std::string& page) {
  const std::size_t begin = page.find("const data = ") + 13, end = page.find(";\n", begin);
  return json::parse(page.substr(begin, end - begin));
}

TEST(KeptPage, HoldsTheTextAndRunsOfWhatEachRowKept) {
  const std::string page = io::kept_page(two_layers());
  EXPECT_TRUE(page.starts_with("<!doctype html>"));
  EXPECT_EQ(page.find("http"), std::string::npos) << "it asks no network";
  const json data = data_of(page);
  EXPECT_EQ(data["model"], "tiny");
  EXPECT_EQ(data["policy"], "tova,budget=2");
  EXPECT_EQ(data["pieces"], json({"A", "b", "c", "d", "e"}));
  EXPECT_EQ(data["prompt"], 3);
  EXPECT_EQ(data["layers"], json({0, 5}));
  EXPECT_EQ(data["kv_heads"], 2);
  EXPECT_EQ(data["folds"], false);
  const json kept = json::parse("[[0, 2, 3, 1], [2, 2], [], [0, 1]]");
  EXPECT_EQ(data["stops"][0], json({{"name", "event 1"}, {"present", 4}, {"bytes", 64}, {"kept", kept}}));
  EXPECT_EQ(data["stops"][1]["kept"][1], json({1, 4}));
}

TEST(KeptPage, IsNotEndedByWhatATokenSays) {
  io::KeptText text = two_layers();
  text.pieces[1] = "</script><script>";
  text.pieces[2] = "<!--";
  text.pieces[3] = "\xff";
  const std::string page = io::kept_page(text);
  EXPECT_EQ(page.find("</script>"), page.rfind("</script>"));
  EXPECT_EQ(page.find("<!--"), std::string::npos);
  EXPECT_EQ(data_of(page)["pieces"], json({"A", "</script><script>", "<!--", "\ufffd", "e"}));
}

TEST(KeptPage, RefusesWhatItsScriptCouldNotShow) {
  const auto refused = [](const std::function<void(io::KeptText&)>& change) {
    io::KeptText text = two_layers();
    change(text);
    EXPECT_THROW(static_cast<void>(io::kept_page(text)), InvalidArgument);
  };
  refused([](io::KeptText& text) { text.prompt = 6; });
  refused([](io::KeptText& text) { text.prompt = -1; });
  refused([](io::KeptText& text) { text.stops.clear(); });
  refused([](io::KeptText& text) { text.layers.clear(); });
  refused([](io::KeptText& text) { text.kv_heads = 0; });
  refused([](io::KeptText& text) { text.stops[0].present = 6; });
  refused([](io::KeptText& text) { text.stops[0].rows.pop_back(); });
  refused([](io::KeptText& text) { text.stops[0].rows[0] = {0, 4}; });
  refused([](io::KeptText& text) { text.stops[0].rows[0] = {1, 1}; });
  refused([](io::KeptText& text) { text.stops[0].rows[0] = {2, 1}; });
  refused([](io::KeptText& text) { text.stops[0].rows[0] = {-1}; });
}

}  // namespace
}  // namespace kvkeep::kept_page_test
