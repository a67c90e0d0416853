/// \file model.hpp: everything about running a language model: loading it, the prefill of a prompt, further tokens
#pragma once

#include "decode.hpp"
#include "language_model.hpp"
#include "prefill.hpp"
