// SPDX-License-Identifier: Apache-2.0
#pragma once
// What kvkeep plan plans for: the layers and heads of a model, by its name, by numbers, or from a file.

#include <string>
#include <vector>

#include "kvkeep/core/model_spec.h"

namespace kvkeep::cli {

// The names that shape_called() knows; and in lines, for help.
std::vector<std::string> names_of_shapes();
std::string known_shapes();

// Of a model by its name; 0 if it is no known name, or a mixture of experts, of which a token reads some.
double parameters_of(const std::string& name);

// A known name, or layers:query heads:KV heads:head size. Throws InvalidArgument for anything else.
ModelSpec shape_called(const std::string& given);

// True if shape_called() takes it, right or wrong: it is no file.
bool is_shape(const std::string& given);

// From a folder with a config.json, or such a file by itself, of any decoder whose layers have a full cache, a window,
// or a state; or from a GGUF file of the architectures that the laboratory runs. Weights are not read. `option` begins
// the messages. Throws InvalidArgument for what is missing or malformed, Unsupported, by name, for caches of another
// kind: latent, shared between layers, mixed in another way.
ModelSpec shape_in(const std::string& path, const std::string& option);

}  // namespace kvkeep::cli
