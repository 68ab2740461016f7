#include "picture.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <numeric>

#include "kvkeep/core/error.h"
#include "picture_page.h"

namespace kvkeep::cli {
namespace {

using Json = nlohmann::ordered_json;
using Positions = std::vector<std::int32_t>;

// [first, length, first, length, ...] of ascending positions.
Json ranges(const Positions& positions) {
  Json all = Json::array();
  for (std::size_t i = 0; i < positions.size();) {
    std::size_t end = i + 1;
    while (end < positions.size() && positions[end] == positions[end - 1] + 1) ++end;
    all.push_back(positions[i]);
    all.push_back(end - i);
    i = end;
  }
  return all;
}

// Maps positions of a second pass, which count from 0 over the tokens it runs on, to places in the prompt.
class Places {
 public:
  Places(const lm::Completion& done, std::int32_t prompt_length) {
    if (!done.prompt || !done.prompt->second_pass) return;
    chosen_ = done.prompt->going_on;
    shift_ = prompt_length - static_cast<std::int32_t>(chosen_.size());
  }
  [[nodiscard]] Positions of(Positions positions) const {
    for (std::int32_t& p : positions)
      p = static_cast<std::size_t>(p) < chosen_.size() ? chosen_[static_cast<std::size_t>(p)] : p + shift_;
    return positions;
  }

 private:
  Positions chosen_;
  std::int32_t shift_ = 0;
};

}  // namespace

std::string picture_page(const PictureAbout& about, const ModelSpec& spec, const lm::Completion& done) {
  const Places places(done, about.prompt_length);
  const auto stop = [&](const std::string& name, std::int32_t step, std::int64_t bytes,
                        const std::vector<Positions>& rows) {
    Json kept = Json::array();
    for (const Positions& row : rows) kept.push_back(ranges(places.of(row)));
    return Json{{"name", name}, {"present", about.prompt_length + step}, {"bytes", bytes}, {"kept", std::move(kept)}};
  };
  Json stops = Json::array();
  for (std::size_t i = 0; i < done.events.size(); ++i) {
    const lm::SequenceEvent& event = done.events[i];
    stops.push_back(
        stop(text("event ", i + 1, " of ", done.events.size(), ", after token ", about.prompt_length + event.step),
             event.step, event.bytes_after, event.positions));
  }
  const auto fed = static_cast<std::int32_t>(about.pieces.size()) - about.prompt_length;
  stops.push_back(stop("the end", fed, done.end_bytes, done.positions));
  const Json data{{"policy", about.policy},           {"model", about.model},         {"prompt", about.prompt_length},
                  {"folds", done.folded.has_value()}, {"layers", spec.full_layers()}, {"kv_heads", spec.kv_heads},
                  {"pieces", about.pieces},           {"stops", std::move(stops)}};
  // A token's text must not end the script that contains it.
  std::string written = data.dump(-1, ' ', false, Json::error_handler_t::replace);
  for (std::size_t at = 0; (at = written.find("</", at)) != std::string::npos; at += 3) written.replace(at, 2, "<\\/");
  for (std::size_t at = 0; (at = written.find("<!--", at)) != std::string::npos; at += 5)
    written.replace(at, 4, "\\u003c!--");
  std::string page = kPicturePage;
  return page.replace(page.find(kPictureData), std::char_traits<char>::length(kPictureData), written);
}

}  // namespace kvkeep::cli
