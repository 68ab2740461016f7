#include "kvkeep/policy/prefill.h"

#include <utility>

namespace kvkeep {

Prefill::Prefill(std::string name, std::unique_ptr<KVPolicy> decoding, std::string json)
    : name_(std::move(name)), decoding_(std::move(decoding)), json_(std::move(json)) {
  KVKEEP_REQUIRE(decoding_ != nullptr, name_,
                 ": decode: policy must not be null; allowed one that decides after the prompt, such as full");
  KVKEEP_REQUIRE(!decoding_->narrows(), name_, ": decode: ", decoding_->name(),
                 " acts on prompts itself; allowed a policy that decides after them");
}

std::vector<std::string> Prefill::problems(const ModelSpec& spec) const {
  std::vector<std::string> found = misfits(spec);
  if (static_cast<std::int32_t>(spec.full_layers().size()) != spec.num_layers())
    found.push_back(text("layers: ", name_, " drops token rows, but ",
                         spec.num_layers() - static_cast<std::int32_t>(spec.full_layers().size()), " of ",
                         spec.num_layers(), " layers are not full attention; allowed models with full layers only"));
  if (decoding_->needs().surprisal)
    found.push_back(text("decode: ", decoding_->name(), " reads the surprisal of every token, but tokens that ", name_,
                         " drops never reach the last layer; allowed a policy that does not read it"));
  for (std::string& one : decoding_->problems(spec)) found.push_back(std::move(one));
  return found;
}

}  // namespace kvkeep
