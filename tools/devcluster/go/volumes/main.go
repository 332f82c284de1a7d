// Command volumes provisions PersistentVolumes as folders of the node: the default StorageClass of the dev cluster.
// Every access mode is granted, because on one node a folder can be shared by all pods.
package main

import (
	"context"
	"flag"
	"os"
	"path/filepath"

	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"
	"sigs.k8s.io/sig-storage-lib-external-provisioner/v10/controller"
)

const provisionerName = "agenticrun.dev/node-folder"

type provisioner struct{ folder, node string }

func (p provisioner) Provision(_ context.Context, options controller.ProvisionOptions) (*core.PersistentVolume, controller.ProvisioningState, error) {
	path := filepath.Join(p.folder, options.PVName)
	if err := os.MkdirAll(path, 0o777); err != nil {
		return nil, controller.ProvisioningFinished, err
	}
	if err := os.Chmod(path, 0o777); err != nil { // past the umask: pods run as any user
		return nil, controller.ProvisioningFinished, err
	}
	return &core.PersistentVolume{
		ObjectMeta: meta.ObjectMeta{Name: options.PVName},
		Spec: core.PersistentVolumeSpec{
			PersistentVolumeReclaimPolicy: *options.StorageClass.ReclaimPolicy,
			AccessModes:                   options.PVC.Spec.AccessModes,
			Capacity:                      core.ResourceList{core.ResourceStorage: options.PVC.Spec.Resources.Requests[core.ResourceStorage]},
			PersistentVolumeSource:        core.PersistentVolumeSource{HostPath: &core.HostPathVolumeSource{Path: path}},
			NodeAffinity: &core.VolumeNodeAffinity{Required: &core.NodeSelector{NodeSelectorTerms: []core.NodeSelectorTerm{{
				MatchExpressions: []core.NodeSelectorRequirement{{Key: core.LabelHostname, Operator: core.NodeSelectorOpIn, Values: []string{p.node}}},
			}}}},
		},
	}, controller.ProvisioningFinished, nil
}

func (p provisioner) Delete(_ context.Context, volume *core.PersistentVolume) error {
	return os.RemoveAll(filepath.Join(p.folder, volume.Name))
}

func main() {
	kubeconfig := flag.String("kubeconfig", "", "path of the kubeconfig")
	folder := flag.String("folder", "", "where the volumes are made")
	node := flag.String("node", "", "name of the node that has the folder")
	flag.Parse()
	config, err := clientcmd.BuildConfigFromFlags("", *kubeconfig)
	if err != nil {
		klog.Fatal(err)
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		klog.Fatal(err)
	}
	ctx := klog.NewContext(context.Background(), klog.Background())
	controller.NewProvisionController(klog.FromContext(ctx), client, provisionerName, provisioner{folder: *folder, node: *node},
		controller.LeaderElection(false)).Run(ctx)
}
