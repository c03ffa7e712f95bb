// See allocate.h. A slot is one draft of one sequence and has the number draft * sequences + sequence.
//
// The slots of each drafter are sorted once. Those of several drafters are merged, and
// those of a depth are what is left of the next one's, so that nothing is sorted again.
#include "allocate.h"

#include <string.h>

enum { MOST_TOGETHER = 3 };  // drafters of which every subset is tried: MOST_DRAFTERS

typedef struct {
    double chance;
    int32_t slot, sequence;
} slot;

typedef struct {
    slot *start;
    int64_t count;
} slots;

typedef struct {
    ft_allocate_call *call;
    slots *sorted;          // [num_options], the best first, without those of chance 0
    slot *merged, *left;    // [sequences * drafts], of the set that is looked at
    double *pass_s;         // [drafts + 1], passes of its drafters by depth
    double *start_s;        // [sequences], of their owners
    double *accepted, *allowed_s;  // [sequences]
    int64_t *owner;         // [sequences]: places in the set
    double best_rate;       // of what `call` says so far
    double unguarded;       // the same of all plans of one drafter, without bounds
    int lacks_rows;         // for all slots of a set
} search;

// What one set of drafters comes to.
typedef struct {
    int64_t options[MOST_TOGETHER], size;
    int64_t num_slots, depth;  // of the best plan; no slots: none is allowed
    double rate, seconds, tokens, unguarded;
} set;

static inline int before(const slot *a, const slot *b) {
    return (a->chance > b->chance) | ((a->chance == b->chance) & (a->slot < b->slot));
}

// Merge neighbouring runs until there is one; `ends` has where each ends. Returns where they are.
static slot *merge_runs(slot *from, slot *to, int64_t *ends, int64_t runs) {
    while (runs > 1) {
        int64_t start = 0, kept = 0;
        for (int64_t r = 0; r < runs; r += 2) {
            const int64_t middle = ends[r], end = r + 1 < runs ? ends[r + 1] : middle;
            int64_t a = start, b = middle, at = start;
            while (a < middle && b < end) {
                const int second = before(&from[b], &from[a]);
                to[at++] = from[second ? b : a];
                b += second;
                a += !second;
            }
            memcpy(to + at, from + a, (size_t)(middle - a) * sizeof(slot));
            memcpy(to + at + middle - a, from + b, (size_t)(end - b) * sizeof(slot));
            ends[kept++] = end;
            start = end;
        }
        runs = kept;
        slot *other = from;
        from = to;
        to = other;
    }
    return from;
}

// Chances fall along a chain: a sequence after the other, its slots are already in order.
static void sort_slots(const search *s, const ft_draft_option *option, slots *into, int64_t *ends) {
    const int64_t sequences = s->call->sequences, drafts = s->call->drafts;
    slot *found = into->start;
    int64_t count = 0, runs = 0;
    for (int64_t i = 0; i < sequences; i++)
        for (int64_t j = 0; j < drafts; j++) {
            const double chance = option->survival[i * drafts + j];
            if (!(chance > 0.0)) continue;
            found[count] = (slot){chance, (int32_t)(j * sequences + i), (int32_t)i};
            if (count && !before(&found[count - 1], &found[count])) ends[runs++] = count;
            count++;
        }
    if (count) ends[runs++] = count;
    const slot *sorted = merge_runs(found, s->left, ends, runs);
    if (sorted != found) memcpy(found, sorted, (size_t)count * sizeof(slot));
    into->count = count;
}

// Whether these drafts could bring more than `rate` in a single pass and without catching up.
static int may_pay(const ft_allocate_call *call, const ft_draft_option *option, slots sorted,
                   double rate) {
    double tokens = 0.0;
    for (int64_t i = 0; i < sorted.count; i++) {
        tokens += sorted.start[i].chance;
        double seconds = call->rows_s[i + 1] + option->slot_s * (double)(i + 1);
        seconds += option->depth_s[1];
        if (((double)call->sequences + tokens) / seconds > rate) return 1;
    }
    return 0;
}

// One sequence and one drafter: a set of slots is a depth.
static void search_alone(const search *s, set *found) {
    const ft_allocate_call *call = s->call;
    const ft_draft_option *option = &call->options[found->options[0]];
    const int64_t room = call->rows - 1, most = call->drafts < room ? call->drafts : room;
    double accepted = 0.0;
    for (int64_t j = 0; j < most; j++) {
        const double chance = option->survival[j];
        accepted += chance;
        double seconds = call->rows_s[j + 1] + option->depth_s[j + 1] + option->start_s[0];
        seconds = seconds + option->slot_s * (double)(j + 1);
        const double rate = chance > 0.0 ? (1.0 + accepted) / seconds : 0.0;
        if (rate > found->unguarded) found->unguarded = rate;
        const int allowed = call->bound_s[0] + call->token_s[0] * accepted >= seconds;
        if (!allowed || !(rate > found->rate)) continue;
        found->rate = rate;
        found->seconds = seconds;
        found->tokens = 1.0 + accepted;
        found->num_slots = found->depth = j + 1;
    }
}

// For each sequence the drafter with most to give at this rate, the first of several.
static void find_owners(const search *s, const set *of) {
    const ft_allocate_call *call = s->call;
    const int64_t last = call->rows - 1, drafts = call->drafts;
    memset(s->owner, 0, (size_t)call->sequences * sizeof(int64_t));
    if (of->size == 1) return;
    const double row_s = (call->rows_s[last] - call->rows_s[0]) / (double)(last > 1 ? last : 1);
    for (int64_t i = 0; i < call->sequences; i++) {
        double most = 0.0;
        for (int64_t c = 0; c < of->size; c++) {
            const ft_draft_option *option = &call->options[of->options[c]];
            const double price = s->best_rate * (row_s + option->slot_s);
            double worth = 0.0;
            for (int64_t j = 0; j < drafts; j++) {
                const double gain = option->survival[i * drafts + j] - price;
                worth += gain > 0.0 ? gain : 0.0;
            }
            worth = worth - s->best_rate * option->start_s[i];
            if (c && !(worth > most)) continue;
            most = worth;
            s->owner[i] = c;
        }
    }
}

static const ft_draft_option *option_of(const search *s, const set *of, int64_t sequence) {
    return &s->call->options[of->options[s->owner[sequence]]];
}

// The slots of all owners in one order.
static slots merge_owned(const search *s, const set *of) {
    if (of->size == 1) return s->sorted[of->options[0]];
    slots merged = {s->merged, 0};
    const slot *at[MOST_TOGETHER], *end[MOST_TOGETHER];
    for (int64_t c = 0; c < of->size; c++) {
        at[c] = s->sorted[of->options[c]].start;
        end[c] = at[c] + s->sorted[of->options[c]].count;
    }
    for (;;) {
        int64_t next = -1;
        for (int64_t c = 0; c < of->size; c++) {
            while (at[c] < end[c] && s->owner[at[c]->sequence] != c) at[c]++;
            if (at[c] < end[c] && (next < 0 || before(at[c], at[next]))) next = c;
        }
        if (next < 0) return merged;
        merged.start[merged.count++] = *at[next]++;
    }
}

// The depth that is still looked at: the last whose drafts could be worth the passes they need.
static int64_t deepest_of(const search *s, const set *of) {
    const ft_allocate_call *call = s->call;
    const int64_t drafts = call->drafts;
    const double plain_rate = (double)call->sequences / call->plain_s;
    double least = 0.0;
    for (int64_t j = drafts - 1; j > 0; j--) {
        const double pass_s = s->pass_s[j + 1] - s->pass_s[j];
        if (j == drafts - 1 || pass_s < least) least = pass_s;
        double brings = 0.0, most = 0.0;
        for (int64_t i = 0; i < call->sequences; i++) {
            const double chance = option_of(s, of, i)->survival[i * drafts + j];
            brings += chance;
            if (chance * call->token_s[i] > most) most = chance * call->token_s[i];
        }
        if (brings > least * plain_rate || most > least) return j + 1;
    }
    return 1;
}

// The slots of one depth of a set, whose sums are made in this order wherever they are needed.
typedef struct {
    slots of;
    double pass_s, slot_s, tokens, starts_s;
    int64_t size;
} sums;

// Seconds of a step with one slot more.
static inline double take_next(const search *s, sums *so_far) {
    const ft_allocate_call *call = s->call;
    const slot *next = &so_far->of.start[so_far->size++];
    so_far->tokens += next->chance;
    so_far->starts_s += next->slot < call->sequences ? s->start_s[next->sequence] : 0.0;
    const double seconds = call->rows_s[so_far->size] + so_far->pass_s;
    return seconds + so_far->slot_s * (double)so_far->size + so_far->starts_s;
}

static inline double rate_of(const search *s, const sums *so_far, double seconds) {
    return ((double)s->call->sequences + so_far->tokens) / seconds;
}

static int64_t least_allowed(const search *s) {
    int64_t least = 0;
    for (int64_t i = 1; i < s->call->sequences; i++)
        if (s->allowed_s[i] < s->allowed_s[least]) least = i;
    return least;
}

// How long a step may take that all sequences allow without drafts, and which of them allows least.
static int64_t begin_bounds(const search *s) {
    const ft_allocate_call *call = s->call;
    memset(s->accepted, 0, (size_t)call->sequences * sizeof(double));
    memcpy(s->allowed_s, call->bound_s, (size_t)call->sequences * sizeof(double));
    return least_allowed(s);
}

// The same with one slot more.
static inline int64_t raise_bounds(const search *s, const slot *next, int64_t least) {
    const int64_t i = next->sequence;
    s->accepted[i] += next->chance;
    s->allowed_s[i] = s->call->bound_s[i] + s->call->token_s[i] * s->accepted[i];
    return i == least ? least_allowed(s) : least;
}

// Whether a step of so many seconds is allowed by all sequences that have these slots.
static int keeps_bounds(const search *s, const slot *start, int64_t size, double seconds) {
    const ft_allocate_call *call = s->call;
    memset(s->accepted, 0, (size_t)call->sequences * sizeof(double));
    for (int64_t i = 0; i < size; i++) s->accepted[start[i].sequence] += start[i].chance;
    int kept = 1;
    for (int64_t i = 0; i < call->sequences; i++)
        kept &= call->bound_s[i] + call->token_s[i] * s->accepted[i] >= seconds;
    return kept;
}

// The best plan of this depth, if it is as good as what was found deeper.
static void search_depth(const search *s, set *found, int64_t depth, sums none) {
    const slot *start = none.of.start;
    double rate = 0.0, seconds = 0.0, tokens = 0.0;
    int64_t size = 0;
    for (sums now = none; now.size < now.of.count;) {
        const double took = take_next(s, &now), here = rate_of(s, &now, took);
        if (!(here > rate)) continue;
        rate = here, seconds = took, tokens = now.tokens, size = now.size;
    }
    if (rate > found->unguarded) found->unguarded = rate;
    if (!size || rate < found->rate) return;
    // The bounds of all sizes are only worked out where the best size breaks one.
    if (!keeps_bounds(s, start, size, seconds)) {
        int64_t least = begin_bounds(s);
        rate = 0.0;
        for (sums now = none; now.size < now.of.count;) {
            least = raise_bounds(s, &start[now.size], least);
            const double took = take_next(s, &now), here = rate_of(s, &now, took);
            if (!(here > rate) || !(s->allowed_s[least] >= took)) continue;
            rate = here, seconds = took, tokens = now.tokens, size = now.size;
        }
        if (rate == 0.0 || rate < found->rate) return;
    }
    found->rate = rate, found->seconds = seconds;
    found->tokens = (double)s->call->sequences + tokens;
    found->num_slots = size, found->depth = depth;
}

// The best plan in which the drafters of the set, and no others, run passes. Depths are looked at from
// the deepest on: what is left of its slots are those of the next. Of equals the shallowest stays.
static void search_set(search *s, set *found) {
    const ft_allocate_call *call = s->call;
    found->num_slots = 0;
    found->rate = found->unguarded = 0.0;
    find_owners(s, found);
    if (call->sequences == 1 && found->size == 1) {
        search_alone(s, found);
        return;
    }
    double slot_s = 0.0;
    memset(s->pass_s, 0, (size_t)(call->drafts + 1) * sizeof(double));
    for (int64_t c = 0; c < found->size; c++) {
        const ft_draft_option *option = &call->options[found->options[c]];
        slot_s += option->slot_s;
        for (int64_t j = 0; j <= call->drafts; j++) s->pass_s[j] += option->depth_s[j];
    }
    slot_s /= (double)found->size;
    for (int64_t i = 0; i < call->sequences; i++) s->start_s[i] = option_of(s, found, i)->start_s[i];
    slots now = merge_owned(s, found);
    s->lacks_rows |= now.count >= call->rows;
    if (s->lacks_rows) return;
    for (int64_t depth = deepest_of(s, found); depth > 0; depth--) {
        slots left = {s->left, 0};
        for (int64_t i = 0; i < now.count; i++) {
            left.start[left.count] = now.start[i];
            left.count += now.start[i].slot < depth * call->sequences;
        }
        now = left;
        const sums none = {now, s->pass_s[depth], slot_s, 0.0, 0.0, 0};
        search_depth(s, found, depth, none);
    }
}

// Write the plan of the set that was looked at last.
static void take(search *s, const set *found) {
    ft_allocate_call *call = s->call;
    s->best_rate = found->rate;
    call->seconds = found->seconds, call->tokens = found->tokens;
    call->unguarded = found->unguarded;
    call->depth = found->depth;
    memset(call->counts, 0, (size_t)call->sequences * sizeof(int64_t));
    const slots from = merge_owned(s, found);
    for (int64_t i = 0, kept = 0; kept < found->num_slots; i++) {
        if (from.start[i].slot >= found->depth * call->sequences) continue;
        call->counts[from.start[i].sequence]++;
        kept++;
    }
    for (int64_t i = 0; i < call->sequences; i++)
        call->drafter[i] = call->counts[i] ? found->options[s->owner[i]] : -1;
}

static void search_all(search *s) {
    ft_allocate_call *call = s->call;
    const double nothing = s->best_rate, least = nothing * (1.0 + call->margin);
    int64_t worthy[MOST_TOGETHER], num_worthy = 0;
    for (int64_t o = 0; o < call->num_options; o++) {
        if (!may_pay(call, &call->options[o], s->sorted[o], least)) continue;
        set alone = {.options = {o}, .size = 1};
        search_set(s, &alone);
        if (alone.unguarded > s->unguarded) s->unguarded = alone.unguarded;
        if (alone.rate > nothing && num_worthy < MOST_TOGETHER) worthy[num_worthy++] = o;
        if (alone.rate > least && alone.rate > s->best_rate) take(s, &alone);
    }
    // One sequence has one drafter, and one that does not pay alone does not pay beside another.
    const int64_t most = num_worthy < call->sequences ? num_worthy : call->sequences;
    for (int64_t size = 2; size <= most; size++)
        for (int64_t chosen = 1; chosen < 1 << num_worthy; chosen++) {
            if (__builtin_popcountll((unsigned long long)chosen) != size) continue;
            set together = {.size = 0};
            for (int64_t w = 0; w < num_worthy; w++)
                if (chosen >> w & 1) together.options[together.size++] = worthy[w];
            search_set(s, &together);
            if (together.rate > least && together.rate > s->best_rate) take(s, &together);
        }
}

int32_t ft_allocate(ft_allocate_call *call) {
    const size_t sequences = (size_t)call->sequences, drafts = (size_t)call->drafts;
    const size_t cells = sequences * drafts, options = (size_t)call->num_options;
    const size_t bytes = (options + 2) * (cells + 1) * sizeof(slot) + options * sizeof(slots) +
                         (drafts + 1 + 3 * sequences) * sizeof(double) +
                         (sequences + cells) * sizeof(int64_t);
    char *memory = ft_scratch(0, bytes);
    if (!memory) return 0;
    search s = {.call = call};
    slot *cell = (slot *)memory;
    s.merged = cell + options * (cells + 1);
    s.left = s.merged + cells + 1;
    s.sorted = (slots *)(s.left + cells + 1);
    s.pass_s = (double *)(s.sorted + options);
    s.start_s = s.pass_s + drafts + 1;
    s.accepted = s.start_s + sequences;
    s.allowed_s = s.accepted + sequences;
    s.owner = (int64_t *)(s.allowed_s + sequences);
    int64_t *const ends = s.owner + sequences;
    for (size_t o = 0; o < options; o++) {
        s.sorted[o].start = cell + o * (cells + 1);
        sort_slots(&s, &call->options[o], &s.sorted[o], ends);
        if (s.sorted[o].count >= call->rows) return 0;
    }
    for (size_t i = 0; i < sequences; i++) call->counts[i] = 0, call->drafter[i] = -1;
    call->depth = 0;
    call->seconds = call->plain_s;
    call->tokens = (double)call->sequences;
    call->unguarded = s.unguarded = s.best_rate = call->tokens / call->seconds;
    search_all(&s);
    if (s.unguarded > call->unguarded) call->unguarded = s.unguarded;
    return !s.lacks_rows;
}
