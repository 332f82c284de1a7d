module agenticrun.dev/devcluster/volumes

go 1.24.0
