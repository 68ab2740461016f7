// SPDX-License-Identifier: Apache-2.0
#include "kvkeep/io/kept_page.h"

#include <algorithm>
#include <functional>
#include <nlohmann/json.hpp>
#include <span>

#include "kept_page_html.h"
#include "kvkeep/core/error.h"

namespace kvkeep::io {
namespace {

using PageJson = nlohmann::ordered_json;

// [first, length, first, length, ...] of ascending positions.
PageJson runs_of(std::span<const std::int32_t> positions) {
  PageJson all = PageJson::array();
  for (std::size_t i = 0; i < positions.size();) {
    std::size_t end = i + 1;
    while (end < positions.size() && positions[end] == positions[end - 1] + 1) ++end;
    all.push_back(positions[i]);
    all.push_back(end - i);
    i = end;
  }
  return all;
}

void check_kept_text(const KeptText& text) {
  const auto tokens = static_cast<std::int64_t>(text.pieces.size());
  const std::int64_t rows = std::int64_t{text.kv_heads} * static_cast<std::int64_t>(text.layers.size());
  KVKEEP_REQUIRE(text.prompt >= 0 && text.prompt <= tokens, "kept page: a prompt of ", text.prompt, " of ", tokens,
                 " tokens; allowed 0 to ", tokens);
  KVKEEP_REQUIRE(rows >= 1 && text.kv_heads >= 1, "kept page: ", text.layers.size(), " layers of ", text.kv_heads,
                 " KV heads; allowed 1 or more of both");
  KVKEEP_REQUIRE(!text.stops.empty(), "kept page: there is no stop; allowed 1 or more");
  for (const KeptStop& stop : text.stops) {
    KVKEEP_REQUIRE(stop.present >= 0 && stop.present <= tokens, "kept page: ", stop.present, " tokens seen of ", tokens,
                   " at '", shortened(stop.name), "'; allowed 0 to ", tokens);
    KVKEEP_REQUIRE(static_cast<std::int64_t>(stop.rows.size()) == rows, "kept page: ", stop.rows.size(), " rows at '",
                   shortened(stop.name), "'; allowed ", rows, ", one for each layer and KV head");
    for (const std::vector<std::int32_t>& row : stop.rows) {
      const bool ascends = std::ranges::adjacent_find(row, std::ranges::greater_equal()) == row.end();
      KVKEEP_REQUIRE(ascends && (row.empty() || (row.front() >= 0 && row.back() < stop.present)),
                     "kept page: positions at '", shortened(stop.name), "' do not ascend from 0 to ", stop.present - 1,
                     "; allowed those of tokens that were seen, each once");
    }
  }
}

void replace_each(std::string& in, const char* what, const char* with) {
  const std::size_t length = std::char_traits<char>::length(what), step = std::char_traits<char>::length(with);
  for (std::size_t at = 0; (at = in.find(what, at)) != std::string::npos; at += step) in.replace(at, length, with);
}

}  // namespace

std::string kept_page(const KeptText& text) {
  check_kept_text(text);
  PageJson stops = PageJson::array();
  for (const KeptStop& stop : text.stops) {
    PageJson kept = PageJson::array();
    for (const std::vector<std::int32_t>& row : stop.rows) kept.push_back(runs_of(row));
    stops.push_back({{"name", stop.name}, {"present", stop.present}, {"bytes", stop.bytes}, {"kept", std::move(kept)}});
  }
  const PageJson data{{"policy", text.policy}, {"model", text.model},      {"prompt", text.prompt},
                      {"folds", text.folds},   {"layers", text.layers},    {"kv_heads", text.kv_heads},
                      {"pieces", text.pieces}, {"stops", std::move(stops)}};
  std::string written = data.dump(-1, ' ', false, PageJson::error_handler_t::replace);
  // A token's text must not end the script that contains it.
  replace_each(written, "</", "<\\/");
  replace_each(written, "<!--", "\\u003c!--");
  std::string page = kKeptPage;
  return page.replace(page.find(kKeptData), std::char_traits<char>::length(kKeptData), written);
}

}  // namespace kvkeep::io
