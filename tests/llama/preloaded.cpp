// SPDX-License-Identifier: Apache-2.0
// A program over the fake of llama.cpp that knows nothing of kvkeep: a prompt of 100 tokens.

#include <llama.h>

#include <vector>

int main() {
  llama_model* model = llama_model_load_from_file("fake:llama", llama_model_default_params());
  llama_context* context = llama_init_from_model(model, llama_context_default_params());
  if (context == nullptr) return 1;
  std::vector<llama_token> prompt(100, 7);
  const int status = llama_decode(context, llama_batch_get_one(prompt.data(), 100));
  llama_free(context);
  llama_model_free(model);
  return status;
}
