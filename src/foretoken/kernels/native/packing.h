// Puts the rows of a matrix in panels of 16 outputs, as linear.h has floats and integers.
#ifndef FORETOKEN_PACKING_H
#define FORETOKEN_PACKING_H

#include "foretoken.h"

// A unit is what lies together in 32 bits: a float, two of bfloat16, four integers of 8 bits or eight of 4.
typedef struct {
    const void *rows;    // [outputs] of units, or of eight bytes for each, whose low halves are packed
    void *packed;        // [panels][units][16]; outputs that are not there become zeros
    int64_t outputs, units;
    int64_t row_bytes;   // from one row to the next
    uint32_t flip;       // what every unit, those of zeros too, is XORed with
    int32_t halves;      // whether rows have eight bytes for each unit
} ft_panel_rows;

FT_EXPORT void ft_pack_rows(const ft_panel_rows *call);

#endif
