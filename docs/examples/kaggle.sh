#!/bin/sh
# From a competition's train.csv to submission.csv: sh kaggle.sh FOLDER [OVERRIDE ...]
# FOLDER has train.csv (id,label), train/, test.csv (id), test/ and sample_submission.csv.
set -eu
folder=$1
shift
set -- data.root="$folder/train.csv" data.images="$folder/train" data.val=0.125 "$@" # an eighth says how good it is

effloop verify "$@"                            # every image decoded once
effloop experiment=probe run=kaggle "$@"       # the last layer of a network that was trained on other images
effloop predict outputs/kaggle "$folder/test.csv" data.images="$folder/test" tta=flip \
    like="$folder/sample_submission.csv" out=submission.csv
