/// \file sequence.hpp: one of the engine's sequences: its cells, and what its layers tell each other
#pragma once

#include <mdkv/core/types.hpp>

#include "cell_list.hpp"

namespace mdkv_ggml
{

/// The first of its layers that have a compressed cache compares all cells. Each other one compares a few, and takes its
/// word: a token that is replaced changes its own cell in every layer, and in the layers after the first those of later
/// tokens only if these are computed anew.
struct sequence
{
    index_t number      = 0;  ///< never given to another one
    cell_list cells     = {}; ///< up to the last token that was seen
    index_t watcher     = -1; ///< number of that layer, none: -1
    index_t overwritten = 0;  ///< how often it found another token
    index_t used        = 0;  ///< the last mask with a token of it
};

/// Neighbouring tokens of a batch that are one sequence's.
struct batch_part
{
    sequence* of    = nullptr; ///< null: none
    index_t first   = 0;       ///< of the batch's tokens
    index_t tokens  = 0;
    index_t before  = 0;       ///< tokens of the sequence before them
    bool known      = true;    ///< which cell is the first one's
    char const* why = nullptr; ///< it cannot be served, if not null
};

} // namespace mdkv_ggml
