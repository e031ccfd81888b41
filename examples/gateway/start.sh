#!/bin/sh
# What `covey run -n N` starts as each rank: two ranks with covey, then one in each language.
here=$(dirname "$0")
case $COVEY_RANK in
  0 | 1) exec python "$here/rank.py" ;;
  2) exec covey gateway python "$here/train.py" ;;
  *) exec covey gateway node "$here/train.js" ;;
esac
