/// \file sequence.hpp: one of the engine's sequences: its cells, and what its layers tell each other
#pragma once

#include <mdkv/core/types.hpp>

#include "cell_list.hpp"

namespace mdkv_ggml
{

/// The sequence's first layer with a compressed cache, the watcher, compares all cells; the other layers compare a few and
/// rely on the watcher. A replaced token changes its own cell in every layer. In the layers after the first it changes the
/// cells of later tokens only if these are computed anew.
struct sequence
{
    index_t number      = 0;  ///< never given to another sequence
    cell_list cells     = {}; ///< cells up to the last token that was seen
    index_t watcher     = -1; ///< number of the watcher, none: -1
    index_t overwritten = 0;  ///< how often the watcher found another token
    index_t used        = 0;  ///< number of the last mask with a token of the sequence
};

/// Neighbouring tokens of a batch that belong to one sequence.
struct batch_part
{
    sequence* of    = nullptr; ///< null: none
    index_t first   = 0;       ///< first of the batch's tokens
    index_t tokens  = 0;
    index_t before  = 0;       ///< tokens of the sequence before them
    bool known      = true;    ///< whether the first token's cell is known
    bool only       = true;    ///< whether the batch has no other part of the sequence
    char const* why = nullptr; ///< reason if the part cannot be served, or null
};

} // namespace mdkv_ggml
