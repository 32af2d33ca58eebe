// Scores of an indexer, which chooses the tokens that attention sees.
#ifndef CIUIC_INDEX_SCORES_H
#define CIUIC_INDEX_SCORES_H

namespace ciuic {

// Tokens that are scored together, one per lane.
constexpr long kIndexTokens = 16;
// Most columns of an index key: 128 in DeepSeek V3.2 and V4. Keys of kIndexTokens tokens are on the stack.
constexpr long kMaxIndexColumns = 512;

}  // namespace ciuic

#endif
