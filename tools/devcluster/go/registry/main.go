// Command registry is the CNCF distribution registry with the filesystem driver only: the drivers of the cloud stores would
// triple its build time, and a development registry stores its images in a folder.
package main

import (
	"github.com/distribution/distribution/v3/registry"
	_ "github.com/distribution/distribution/v3/registry/storage/driver/filesystem"
)

func main() {
	registry.RootCmd.Execute() //nolint:errcheck // cobra has printed the error
}
