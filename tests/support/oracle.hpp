/// \file oracle.hpp: the method by its formulas, in plain loops, everything materialised; shares no code with the library
/// (arXiv 2603.20616, sections 4.1, 4.2)
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "real.hpp"

namespace support::oracle
{

using support::real;
using count = std::int64_t;

/// Row by row.
struct matrix
{
    count rows = 0;
    count cols = 0;
    std::vector<real> data;

    matrix() = default;
    matrix(count r, count c)
        : rows{r}
        , cols{c}
        , data(static_cast<std::size_t>(r * c), real{0})
    {}
    real& operator()(count i, count j) { return data[static_cast<std::size_t>(i * cols + j)]; }
    real operator()(count i, count j) const { return data[static_cast<std::size_t>(i * cols + j)]; }
};

/// Sum over d of a(i, d) b(j, d).
inline real dot(matrix const& a, count i, matrix const& b, count j)
{
    real sum = 0;
    for (count d = 0; d < a.cols; ++d) { sum += a(i, d) * b(j, d); }
    return sum;
}

inline real norm(matrix const& a, count i)
{
    return std::sqrt(dot(a, i, a, i));
}

/// X'X.
inline matrix gram(matrix const& x)
{
    matrix g{x.cols, x.cols};
    for (count i = 0; i < x.rows; ++i)
    {
        for (count a = 0; a < x.cols; ++a)
        {
            for (count b = 0; b < x.cols; ++b) { g(a, b) += x(i, a) * x(i, b); }
        }
    }
    return g;
}

struct eigen
{
    std::vector<real> values; ///< falling
    matrix vectors;           ///< one a row
};

/// Jacobi's rotations until nothing is left off the diagonal: slow, and right whatever the spectrum.
inline eigen eigenvectors(matrix a)
{
    count const n = a.rows;
    matrix v{n, n};
    for (count i = 0; i < n; ++i) { v(i, i) = 1; }
    real const unit = std::numeric_limits<real>::epsilon();
    for (int sweep = 0; sweep < 60; ++sweep)
    {
        real off = 0;
        real all = 0;
        for (count i = 0; i < n; ++i)
        {
            for (count j = 0; j < n; ++j)
            {
                all += a(i, j) * a(i, j);
                off += i == j ? 0 : a(i, j) * a(i, j);
            }
        }
        if (off <= all * (100 * unit * unit)) { break; }
        for (count p = 0; p < n; ++p)
        {
            for (count q = p + 1; q < n; ++q)
            {
                if (a(p, q) == 0) { continue; }
                real const theta = (a(q, q) - a(p, p)) / (2 * a(p, q));
                real const t = (theta >= 0 ? real{1} : real{-1}) / (std::fabs(theta) + std::sqrt(theta * theta + 1));
                real const c = 1 / std::sqrt(t * t + 1);
                real const s = t * c;
                for (count k = 0; k < n; ++k)
                {
                    real const x = a(k, p);
                    real const y = a(k, q);
                    a(k, p)      = c * x - s * y;
                    a(k, q)      = s * x + c * y;
                }
                for (count k = 0; k < n; ++k)
                {
                    real const x = a(p, k);
                    real const y = a(q, k);
                    a(p, k)      = c * x - s * y;
                    a(q, k)      = s * x + c * y;
                    real const z = v(p, k);
                    real const w = v(q, k);
                    v(p, k)      = c * z - s * w;
                    v(q, k)      = s * z + c * w;
                }
            }
        }
    }
    std::vector<count> order(static_cast<std::size_t>(n));
    for (count i = 0; i < n; ++i) { order[static_cast<std::size_t>(i)] = i; }
    std::sort(order.begin(), order.end(), [&](count i, count j) { return a(i, i) > a(j, j); });
    eigen result{{}, matrix{n, n}};
    for (count i = 0; i < n; ++i)
    {
        count const from = order[static_cast<std::size_t>(i)];
        result.values.push_back(a(from, from));
        for (count d = 0; d < n; ++d) { result.vectors(i, d) = v(from, d); }
    }
    return result;
}

/// To the nearest half, ties to even; beyond its range, its largest.
inline float nearest_half(float x)
{
    if (x == 0) { return x; }
    float const unit = std::ldexp(1.0F, std::max(std::ilogb(x), -14) - 10); // subnormals share the last unit
    return std::clamp(std::nearbyint(x / unit) * unit, -65504.0F, 65504.0F);
}

/// The first n entries of a row as they are read from codes of so many bits, by the layout's rule: groups of 64, the last
/// shorter; minimum and scale halves; the code nearest to (x - minimum) / scale. In float, as the rule has it: which of two
/// codes a coordinate between them gets decides by their whole distance.
inline void read_again(matrix& x, count row, count n, int bits)
{
    float const codes = bits == 8 ? 255.0F : 15.0F;
    for (count first = 0; first < n; first += 64)
    {
        count const end = std::min(n, first + 64);
        auto least      = static_cast<float>(x(row, first));
        float most      = least;
        for (count d = first; d < end; ++d)
        {
            least = std::min(least, static_cast<float>(x(row, d)));
            most  = std::max(most, static_cast<float>(x(row, d)));
        }
        float const minimum = nearest_half(least);
        float const scale   = nearest_half(std::max(most - minimum, 0.0F) / codes);
        float const inverse = scale > 0 ? 1.0F / scale : 0.0F;
        for (count d = first; d < end; ++d)
        {
            auto const value = static_cast<float>(x(row, d));
            float const at   = (value - minimum) * inverse + 0.5F;
            x(row, d) = static_cast<real>(minimum) + static_cast<real>(scale) * std::floor(std::clamp(at, 0.0F, codes));
        }
    }
}

/// Groups of 64 entries of a row, the last one shorter: each, in pieces that are the largest powers of two from its first entry
/// on, times the Hadamard matrix of the piece's size and 1 / its root. Rounded as the rule has it, so that codes are chosen for
/// the same numbers: once for the sum, once for the product.
inline void turn(matrix& x, count row)
{
    count n = 0;
    for (count first = 0; first < x.cols; first += n)
    {
        n = std::min(x.cols, first / 64 * 64 + 64) - first;
        while ((n & (n - 1)) != 0) { n &= n - 1; } // its highest bit alone
        std::vector<real> turned;
        for (count i = 0; i < n; ++i)
        {
            real sum = 0;
            for (count j = 0; j < n; ++j)
            {
                bool odd = false; // the number of bits that i and j share
                for (count shared = i & j; shared != 0; shared /= 2) { odd ^= shared % 2 != 0; }
                sum += odd ? -x(row, first + j) : x(row, first + j);
            }
            auto const factor = static_cast<float>(1 / std::sqrt(static_cast<real>(n)));
            turned.push_back(real{static_cast<float>(sum) * factor});
        }
        for (count i = 0; i < n; ++i) { x(row, first + i) = turned[static_cast<std::size_t>(i)]; }
    }
}

/// A row as it is read from codes of its own coordinates: turned, written, read, turned back.
inline void read_again_turned(matrix& x, count row, int bits)
{
    turn(x, row);
    read_again(x, row, x.cols, bits);
    turn(x, row);
}

/// Every row replaced by what its first r products with the rows of `basis` are of it, each stored in so many bits (0: as it
/// is) and multiplied with the same row of `back`, which is the basis itself where that is orthonormal.
inline matrix compressed(matrix const& x, matrix const& basis, count r, matrix const& back, int bits)
{
    matrix y{x.rows, x.cols};
    for (count i = 0; i < x.rows; ++i)
    {
        matrix stored{1, r};
        for (count c = 0; c < r; ++c) { stored(0, c) = dot(x, i, basis, c); }
        if (bits > 0) { read_again(stored, 0, r, bits); }
        for (count c = 0; c < r; ++c)
        {
            for (count d = 0; d < x.cols; ++d) { y(i, d) += stored(0, c) * back(c, d); }
        }
    }
    return y;
}
inline matrix compressed(matrix const& x, matrix const& basis, count r)
{
    return compressed(x, basis, r, basis, 0);
}

struct probabilities
{
    matrix p;              ///< [Q, keys]
    std::vector<real> lse; ///< [Q]
};

/// Softmax of q.k * scale; query i sees the keys 0 ... first_query + i.
inline probabilities softmax(matrix const& queries, matrix const& keys, real scale, count first_query)
{
    probabilities out{matrix{queries.rows, keys.rows}, {}};
    for (count i = 0; i < queries.rows; ++i)
    {
        count const seen = std::min(keys.rows, first_query + i + 1);
        real most        = -std::numeric_limits<real>::infinity();
        for (count j = 0; j < seen; ++j)
        {
            out.p(i, j) = dot(queries, i, keys, j) * scale;
            most        = std::max(most, out.p(i, j));
        }
        real sum = 0;
        for (count j = 0; j < seen; ++j) { sum += std::exp(out.p(i, j) - most); }
        for (count j = 0; j < seen; ++j) { out.p(i, j) = std::exp(out.p(i, j) - most) / sum; }
        out.lse.push_back(seen == 0 ? -std::numeric_limits<real>::infinity() : most + std::log(sum));
    }
    return out;
}

/// Mean and scale of every channel of keys, and root mean square of the queries in it.
struct channels
{
    std::vector<real> mean;
    std::vector<real> scale;
    std::vector<real> query;
};

/// Mean of (x - from)^power in channel d.
inline real average(matrix const& x, count d, real from, int power)
{
    real sum = 0;
    for (count i = 0; i < x.rows; ++i) { sum += std::pow(x(i, d) - from, power); }
    return x.rows == 0 ? real{0} : sum / static_cast<real>(x.rows);
}

/// The mean in channel d of those rows that are no farther from it than four times their mean distance.
inline real trimmed_mean(matrix const& x, count d)
{
    real const about = average(x, d, 0, 1);
    real far = 0, sum = 0;
    count near = 0;
    for (count i = 0; i < x.rows; ++i) { far += std::fabs(x(i, d) - about); }
    for (count i = 0; i < x.rows; ++i)
    {
        bool const is_near = std::fabs(x(i, d) - about) <= 4 * far / static_cast<real>(x.rows);
        sum += is_near ? x(i, d) - about : 0;
        near += is_near ? 1 : 0;
    }
    return about + (near > 0 ? sum / static_cast<real>(near) : 0);
}

inline channels channels_of(matrix const& queries, matrix const& keys)
{
    channels out;
    for (count d = 0; d < keys.cols; ++d)
    {
        real const mean   = average(keys, d, 0, 1);
        real const spread = std::sqrt(average(keys, d, mean, 2));
        real const query  = queries.rows == 0 ? real{1} : std::sqrt(average(queries, d, 0, 2));
        real const limit  = 1024;
        real scale        = 1;
        if (spread > 0) { scale = query > 0 ? std::clamp(std::sqrt(spread / query), 1 / limit, limit) : limit; }
        out.mean.push_back(mean);
        out.scale.push_back(scale);
        out.query.push_back(query);
    }
    return out;
}

/// Variance of the logits of a key whose codes have so many steps, over queries that are as the channels say.
inline real logit_variance(matrix const& keys, count token, channels const& by, real scale, real steps)
{
    matrix x{1, keys.cols};
    for (count d = 0; d < keys.cols; ++d)
    {
        auto const c = static_cast<std::size_t>(d);
        x(0, d)      = (keys(token, d) - by.mean[c]) / by.scale[c];
    }
    turn(x, 0);
    real sum = 0;
    for (count first = 0; first < keys.cols; first += 64)
    {
        real least = x(0, first), most = least, asked = 0;
        for (count d = first; d < std::min(keys.cols, first + 64); ++d)
        {
            auto const c = static_cast<std::size_t>(d);
            least        = std::min(least, x(0, d));
            most         = std::max(most, x(0, d));
            asked += by.query[c] * by.scale[c] * by.query[c] * by.scale[c];
        }
        real const step = (most - least) / steps;
        sum += step * step / 12 * asked * scale * scale;
    }
    return sum;
}

/// The same for codes of the key's first r coordinates in the basis.
inline real latent_variance(
    matrix const& queries, matrix const& keys, count token, matrix const& basis, count r, real scale, real steps)
{
    real sum = 0;
    for (count first = 0; first < r; first += 64)
    {
        real least = dot(keys, token, basis, first), most = least, asked = 0;
        for (count c = first; c < std::min(r, first + 64); ++c)
        {
            real const x = dot(keys, token, basis, c);
            least        = std::min(least, x);
            most         = std::max(most, x);
            for (count i = 0; i < queries.rows; ++i) { asked += std::pow(dot(queries, i, basis, c), 2); }
        }
        real const step = (most - least) / steps;
        sum += step * step / 12 * asked / static_cast<real>(queries.rows) * scale * scale;
    }
    return sum;
}

/// What a token keeps of its key and of its value.
struct coordinates
{
    count keys;
    count values;
    int bits = 0; ///< of each; 0: as it is
};

/// What losses may depend on besides.
struct scoring
{
    std::vector<real> weights = {}; ///< [Q]; none: 1
    real power                = 1;  ///< of the norm over a head's rows; infinity: their maximum
};

/// Algorithm 1 for one KV head: the losses [rungs, N] of the first N rows of `keys`; what follows them is the window, whose
/// keys stay as they are. `queries` are those of all the head's query heads, Q each, one query head after another.
struct scores
{
    matrix loss;               ///< [rungs, N]
    std::vector<real> dropped; ///< [N]   loss of dropping: the magnitude against which errors of a loss are judged
    std::vector<real> lse;     ///< [G*Q]
};

inline scores losses(matrix const& queries, count per_query_head, matrix const& keys, matrix const& values,
    matrix const& key_basis, matrix const& value_basis, std::vector<coordinates> const& rungs, real scale,
    count first_query, scoring const& how = {})
{
    count const n     = values.rows;
    auto const weight = [&](count row) {
        return how.weights.empty() ? real{1} : how.weights[static_cast<std::size_t>(row % per_query_head)];
    };
    count const total    = keys.rows;
    count const dim      = keys.cols;
    auto const attention = [&](matrix const& k) {
        probabilities all{matrix{queries.rows, total}, {}};
        for (count g = 0; g < queries.rows / per_query_head; ++g)
        {
            matrix one{per_query_head, dim};
            for (count i = 0; i < per_query_head; ++i)
            {
                for (count d = 0; d < dim; ++d) { one(i, d) = queries(g * per_query_head + i, d); }
            }
            probabilities const part = softmax(one, k, scale, first_query);
            for (count i = 0; i < per_query_head; ++i)
            {
                for (count j = 0; j < total; ++j) { all.p(g * per_query_head + i, j) = part.p(i, j); }
                all.lse.push_back(part.lse[static_cast<std::size_t>(i)]);
            }
        }
        return all;
    };
    probabilities const exact = attention(keys);
    scores out{
        matrix{static_cast<count>(rungs.size()), n}, std::vector<real>(static_cast<std::size_t>(n), 0), exact.lse};
    // The norm over the rows of the weighted difference of two attentions to key j; without the second, of the first.
    auto const over_rows = [&](probabilities const& a, probabilities const* b, count j) {
        real joined = 0;
        for (count i = 0; i < queries.rows; ++i)
        {
            real const x = weight(i) * std::fabs(a.p(i, j) - (b == nullptr ? 0 : b->p(i, j)));
            joined       = std::isinf(how.power) ? std::max(joined, x) : joined + std::pow(x, how.power);
        }
        return std::isinf(how.power) ? joined : std::pow(joined, 1 / how.power);
    };
    // With codes of whole vectors values are taken less the means of their channels.
    bool coded = false;
    for (coordinates const& r : rungs) { coded = coded || (r.bits > 0 && r.keys == dim && r.values == values.cols); }
    matrix centred = values;
    for (count d = 0; coded && d < values.cols; ++d)
    {
        real const mean = trimmed_mean(values, d);
        for (count j = 0; j < n; ++j) { centred(j, d) -= mean; }
    }
    // Losses are then centred: lengths are distances from the mean by attention.
    matrix apart = values;
    for (count d = 0; coded && d < values.cols; ++d)
    {
        real sum = 0, masses = 0;
        for (count j = 0; j < n; ++j)
        {
            real const mass = over_rows(exact, nullptr, j);
            sum += mass * values(j, d);
            masses += mass;
        }
        for (count j = 0; j < n; ++j) { apart(j, d) -= masses > 0 ? sum / masses : 0; }
    }
    auto const length = [&](count j) { return norm(apart, j); };
    for (count j = 0; j < n; ++j)
    {
        out.dropped[static_cast<std::size_t>(j)] = 2 * over_rows(exact, nullptr, j) * length(j);
    }
    auto const noise = [](real variance) {
        real const x = std::min(variance, real{20});
        return real{0.25} * real{0.25} * std::exp(x) * std::expm1(x);
    };
    matrix tokens{n, dim};
    for (count j = 0; j < n; ++j)
    {
        for (count d = 0; d < dim; ++d) { tokens(j, d) = keys(j, d); }
    }
    channels const known = channels_of(queries, tokens);
    for (count r = 0; r < out.loss.rows; ++r)
    {
        coordinates const kept = rungs[static_cast<std::size_t>(r)];
        bool const all         = kept.keys == dim && kept.values == values.cols;
        if (all && kept.bits == 0) { continue; }
        if (kept.keys == 0)
        {
            for (count j = 0; j < n; ++j) { out.loss(r, j) = out.dropped[static_cast<std::size_t>(j)]; }
            continue;
        }
        matrix changed = keys;
        matrix reduced = tokens;
        matrix v       = values;
        if (all)
        {
            v = centred;
            for (count j = 0; j < n; ++j) { read_again_turned(v, j, kept.bits); }
        }
        else
        {
            reduced = compressed(tokens, key_basis, kept.keys);
            v       = compressed(values, value_basis, kept.values, value_basis, kept.bits);
        }
        for (count j = 0; j < n; ++j)
        {
            for (count d = 0; d < dim; ++d) { changed(j, d) = reduced(j, d); }
        }
        probabilities const other = attention(changed);
        for (count j = 0; j < n; ++j)
        {
            real far = 0;
            matrix const& from = all ? centred : values;
            for (count d = 0; d < values.cols; ++d) { far += (from(j, d) - v(j, d)) * (from(j, d) - v(j, d)); }
            if (kept.bits > 0)
            {
                real const steps    = kept.bits == 8 ? 255 : 15;
                real const variance = all ? logit_variance(tokens, j, known, scale, steps)
                                          : latent_variance(queries, tokens, j, key_basis, kept.keys, scale, steps);
                far += noise(variance) * length(j) * length(j);
            }
            out.loss(r, j) = over_rows(exact, nullptr, j) * std::sqrt(far);
            if (!all) { out.loss(r, j) += over_rows(other, &exact, j) * length(j); }
        }
    }
    return out;
}

/// Largest, or sum divided by the width, of the neighbours that exist.
inline std::vector<real> pooled(std::vector<real> const& loss, count width, bool mean)
{
    std::vector<real> out;
    auto const n = static_cast<count>(loss.size());
    for (count i = 0; i < n; ++i)
    {
        real value = mean ? 0 : loss[static_cast<std::size_t>(i)];
        for (count j = std::max<count>(0, i - width / 2); j <= std::min(n - 1, i + width / 2); ++j)
        {
            real const x = loss[static_cast<std::size_t>(j)];
            value        = mean ? value + x : std::max(value, x);
        }
        out.push_back(mean ? value / static_cast<real>(width) : value);
    }
    return out;
}

/// softmax(QK') V; every query sees every key.
inline matrix attention(matrix const& queries, matrix const& keys, matrix const& values, real scale)
{
    probabilities const all = softmax(queries, keys, scale, keys.rows);
    matrix out{queries.rows, values.cols};
    for (count i = 0; i < queries.rows; ++i)
    {
        for (count j = 0; j < keys.rows; ++j)
        {
            for (count d = 0; d < values.cols; ++d) { out(i, d) += all.p(i, j) * values(j, d); }
        }
    }
    return out;
}

} // namespace support::oracle
