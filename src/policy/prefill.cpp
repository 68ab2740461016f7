#include "kvkeep/policy/prefill.h"

#include <utility>

namespace kvkeep {

Prefill::Prefill(std::string name, std::unique_ptr<KVPolicy> decoding, std::string json)
    : name_(std::move(name)), decoding_(std::move(decoding)), json_(std::move(json)) {
  KVKEEP_REQUIRE(decoding_ != nullptr, name_,
                 ": decode: there is no policy; allowed one that decides behind the prompt, such as full");
  KVKEEP_REQUIRE(!decoding_->narrows(), name_, ": decode: ", decoding_->name(),
                 " acts on prompts itself; allowed a policy that decides behind them");
}

std::vector<std::string> Prefill::problems(const ModelSpec& spec) const {
  std::vector<std::string> found = misfits(spec);
  if (static_cast<std::int32_t>(spec.full_layers().size()) != spec.num_layers())
    found.push_back(text("layers: ", name_, " drops token rows, and ",
                         spec.num_layers() - static_cast<std::int32_t>(spec.full_layers().size()), " of ",
                         spec.num_layers(), " layers are not full attention; allowed models of full layers alone"));
  if (decoding_->needs().surprisal)
    found.push_back(text("decode: ", decoding_->name(), " reads the surprisal of every token, and tokens that ", name_,
                         " leaves behind never come to the last layer; allowed a policy that does not"));
  for (std::string& one : decoding_->problems(spec)) found.push_back(std::move(one));
  return found;
}

}  // namespace kvkeep
