/* The random words of dropout as a stream, given to a battery of TestU01; see randomness.py. */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "bbattery.h"
#include "unif01.h"

static const uint32_t row_factors[4] = {ROW_FACTORS};
static uint32_t key[4], words[4], row, column, site, width;
static int order, reversed, word, next_word = 4;
enum { ALONG_ROWS, DOWN_COLUMNS, OVER_SITES };

static void to_next_place(void) {
    uint32_t *inner = order == DOWN_COLUMNS ? &row : &column, *outer = order == DOWN_COLUMNS ? &column : &row;
    if (order == OVER_SITES && ++site < SITES_OF_MODEL) return;
    site = 0;
    if (++*inner == width) *inner = 0, ++*outer;
}

static void stir(void) {
    words[0] += words[1] * words[3];
    words[1] += words[2] * words[0];
    words[2] += words[0] * words[1];
    words[3] += words[1] * words[2];
}

static void draw(void) {
    uint32_t at_row[4];
    for (int i = 0; i < 4; i++) at_row[i] = key[i] + row * row_factors[i];
    for (int i = 0; i < 4; i++) words[i] = at_row[i] + 2 * column * at_row[(i + 2) % 4];
    stir();
    for (int i = 0; i < 4; i++) words[i] = words[i] >> 16 | words[i] << 16;
    stir();
    to_next_place();
}

static uint32_t mix(uint32_t x) {
    x = (x ^ x >> 16) * 0x7FEB352D;
    x = (x ^ x >> 15) * 0x846CA68B;
    return x ^ x >> 16;
}

static uint32_t between_layers(void) {
    uint32_t row_key = mix(key[0] ^ row);
    uint32_t found = mix(row_key + (row_key << 16 | row_key >> 16) * (site * SITES + 2 * column));
    to_next_place();
    return found;
}

static unsigned int reverse(uint32_t x) {
    x = (x >> 1 & 0x55555555) | (x & 0x55555555) << 1;
    x = (x >> 2 & 0x33333333) | (x & 0x33333333) << 2;
    x = (x >> 4 & 0x0F0F0F0F) | (x & 0x0F0F0F0F) << 4;
    x = (x >> 8 & 0x00FF00FF) | (x & 0x00FF00FF) << 8;
    return x >> 16 | x << 16;
}

static unsigned int next(void) {
    uint32_t found;
    if (word < 4) { /* one word of each draw of attention */
        draw();
        found = words[word];
    } else if (word == 4) { /* all of them */
        if (next_word == 4) draw(), next_word = 0;
        found = words[next_word++];
    } else {
        found = between_layers();
    }
    return reversed ? reverse(found) : found;
}

int main(int count, char **given) {
    if (count != 10) return 2;
    int crush = atoi(given[1]);
    order = atoi(given[2]), reversed = atoi(given[3]), word = atoi(given[4]), width = atoi(given[5]);
    for (int i = 0; i < 4; i++) key[i] = strtoul(given[6 + i], NULL, 10);
    unif01_Gen *generator = unif01_CreateExternGenBits("dropout", next);
    if (crush)
        bbattery_Crush(generator);
    else
        bbattery_SmallCrush(generator);
    for (int i = 0; i < bbattery_NTests; i++) printf("p %s = %.17g\n", bbattery_TestNames[i], bbattery_pVal[i]);
    return 0;
}
