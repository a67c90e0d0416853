/// \file model.hpp: everything about running a llama model: loading it, the prefill of a prompt, further tokens
#pragma once

#include "decode.hpp"
#include "llama_model.hpp"
#include "prefill.hpp"
