/// \file ground.hpp: what every other header is written with: types, views, errors, and whole numbers of the standard library.
#pragma once

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>

#include <cstddef>
#include <cstdint>
